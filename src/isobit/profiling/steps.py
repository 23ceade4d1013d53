"""The steps of a trace: annotations of torch.profiler's schedule, or the whole trace."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from isobit.profiling.reading.json_stream import refuse
from isobit.profiling.reading.trace import Event, Trace

STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True)
class Step:
    """One step: its name, and its window in nanoseconds."""

    name: str
    start: int
    end: int


def steps_of(trace: Trace) -> tuple[Step, ...]:
    """Return the steps of a trace, by start.

    A step begins with its annotation and ends where the next one begins, if that is the next number, so the steps of a
    recording tile it. The last one ends with the device work that it launched, which ends after the annotation.
    """
    notes = [e for e in trace.host_slices if e.kind == "note" and STEP.fullmatch(e.name)]
    notes.sort(key=lambda event: (event.start, event.end))
    if not notes:
        work = trace.device + [e for e in trace.host_slices if e.kind in ("operator", "call")]
        return (Step("whole trace", min(e.start for e in work), max(e.end for e in work)),)
    ends = ends_of_work(trace, notes)
    steps = []
    for note, following, end in zip(notes, [*notes[1:], None], ends, strict=True):
        if following is not None:
            is_next = number_of(following) == number_of(note) + 1
            end = following.start if is_next else min(end, following.start)
        if end > note.start:
            steps.append(Step(note.name, note.start, end))
    if not steps:
        raise refuse(trace.name, "steps that take time", f"{len(notes)} empty steps")
    return tuple(steps)


def number_of(note: Event) -> int:
    """Return the number in the name of a step."""
    found = STEP.fullmatch(note.name)
    assert found is not None
    return int(found[1])


def ends_of_work(trace: Trace, notes: list[Event]) -> list[int]:
    """Return when each annotation and the device work that was launched during it end."""
    starts, ends = [note.start for note in notes], [note.end for note in notes]
    for event in trace.device:
        if event.launch is not None:
            index = bisect_right(starts, event.launch.start) - 1
            if index >= 0 and event.launch.start < notes[index].end:
                ends[index] = max(ends[index], event.end)
    return ends
