"""Match the collectives of several ranks, and tell waiting for the last rank from what comes after it.

[Note: Waiting and moving]
A collective's kernel starts when its rank arrives and cannot finish before the last rank has arrived. From a rank's
start to the last rank's start it waits; from there to its end, data move. One rank's trace has only the sum, so with
traces of some ranks nothing is told: the last rank may be one without a trace. Collectives are matched by step, group
and their number in both. Clocks of one host agree; if a collective ends on a rank before it starts on another, the
clocks do not, and they are aligned by the ends of collectives.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from isobit.profiling.bricks import collective_name, message_words
from isobit.profiling.reading.trace import Event, Trace
from isobit.profiling.steps import Step

MESSAGES = re.compile(r"send|recv|p2p", re.I)
ALL_WAIT_FOR_ALL = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier", re.I)
MOST_LEVELS = 64  # from a launch up to its annotation
MEMBERS = re.compile(r"\[(\d{1,7}(?:, ?\d{1,7})*)\]")


@dataclass
class Meeting:
    """One collective on all ranks of its group: the slice of each."""

    number: int
    step: str
    name: str
    detail: str
    slices: dict[int, Event]


@dataclass
class Matched:
    """The meetings in the order in which they completed, clock offsets in nanoseconds, and what was not matched."""

    meetings: list[Meeting]
    offsets: dict[int, int]
    notes: list[str]

    def start(self, meeting: Meeting, rank: int) -> int:
        """Return when a rank arrived, on the common clock."""
        return meeting.slices[rank].start - self.offsets[rank]

    def end(self, meeting: Meeting, rank: int) -> int:
        """Return when a rank left, on the common clock."""
        return meeting.slices[rank].end - self.offsets[rank]


def match(
    traces: Sequence[Trace], steps: dict[int, tuple[Step, ...]], world: int
) -> Matched | None:
    """Match the collectives of all ranks; None if the traces have none, or are of one rank alone.

    Args:
        traces: One per rank.
        steps: The steps of each rank.
        world: The number of ranks of the run.
    """
    if not any(trace.collectives for trace in traces) or world < 2:
        return None
    found = Matched([], {trace.rank: -trace.base for trace in traces}, [])
    if len(traces) < world:
        found.notes.append(
            f"waiting for other ranks and moving data cannot be told apart from {len(traces)} of {world} ranks: "
            "record all ranks"
        )
        return found
    lists: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(dict)
    skipped = 0
    for trace in traces:
        for event in trace.collectives:
            if is_message(event):
                skipped += 1
                continue
            key = (step_name(event, steps[trace.rank]), group_of(event))
            lists[key].setdefault(trace.rank, []).append(event)
    if skipped:
        found.notes.append(
            f"{skipped} sends and receives are not matched: they concern two ranks each"
        )
    for (step, group), ranks in lists.items():
        members = members_of(group, world)
        problem = disagreement(ranks, members)
        if problem:
            found.notes.append(f"{step or 'outside of steps'}: {problem}")
            continue
        for slices in zip(*(ranks[rank] for rank in members), strict=True):
            by_rank = dict(zip(members, slices, strict=True))
            first = slices[0]
            meeting = Meeting(0, step, collective_name(first), message_words(first), by_rank)
            found.meetings.append(meeting)
    align(found)
    found.meetings.sort(key=lambda m: max(found.start(m, rank) for rank in m.slices))
    for number, meeting in enumerate(found.meetings):
        meeting.number = number
    return found


def is_message(event: Event) -> bool:
    """Whether a slice is a send or a receive. NCCL's kernel of an all-to-all also has SendRecv in its name."""
    if event.message is not None:
        return bool(MESSAGES.match(str(event.message.get("Collective name", ""))))
    if event.kind == "note":
        return bool(MESSAGES.match(event.name.split(":", 1)[1].strip()))
    host = event.launch
    for _ in range(MOST_LEVELS):
        if host is None:
            break
        if host.kind == "note" and host.name.startswith("nccl:"):
            return bool(MESSAGES.match(host.name[5:].strip()))
        host = host.parent
    return False


def step_name(event: Event, steps: Sequence[Step]) -> str:
    """Return the step in which a collective was launched, or else started."""
    at = event.launch.start if event.launch is not None else event.start
    index = bisect_right(steps, at, key=lambda step: step.start) - 1
    return steps[index].name if index >= 0 and at < steps[index].end else ""


def group_of(event: Event) -> str:
    """Return the ranks of a collective's group as text, or its name; "" is all ranks."""
    if event.message is None:
        return ""
    for field in ("Process Group Ranks", "Process Group Name"):
        value = event.message.get(field)
        if isinstance(value, str) and value:
            return value
    return ""


def members_of(group: str, world: int) -> list[int]:
    """Return the ranks of a group."""
    found = MEMBERS.fullmatch(group)
    return sorted({int(word) for word in found[1].split(",")}) if found else list(range(world))


def disagreement(ranks: dict[int, list[Event]], members: list[int]) -> str:
    """Say why collectives of one step and group cannot be matched by their order, or return nothing."""
    if sorted(ranks) != members:
        missing = sorted(set(members) ^ set(ranks))
        return f"collectives of one group are missing on ranks {missing[:8]}"
    counts = {rank: len(events) for rank, events in ranks.items()}
    if len(set(counts.values())) > 1:
        return f"ranks have different numbers of collectives: {dict(list(counts.items())[:8])}"
    for number, slices in enumerate(zip(*ranks.values(), strict=True)):
        names = {(collective_name(event), message_words(event)) for event in slices}
        if len({name for name, _ in names}) > 1:
            return f"collective {number} is not the same on all ranks: {sorted(n for n, _ in names)[:4]}"
    return ""


def align(found: Matched) -> None:
    """Align clocks by the ends of collectives, if one ended on a rank before it started on another."""
    proving = [
        m
        for m in found.meetings
        if ALL_WAIT_FOR_ALL.search(m.name) and len(m.slices) == len(found.offsets)
    ]
    early = [
        m
        for m in proving
        if min(found.end(m, rank) for rank in m.slices)
        < max(found.start(m, rank) for rank in m.slices)
    ]
    if not early:
        return
    reference = min(found.offsets)
    gaps = {
        rank: [found.end(m, rank) - found.end(m, reference) for m in proving]
        for rank in found.offsets
    }
    shifts = {rank: int(statistics.median_low(values)) for rank, values in gaps.items()}
    residual = max(abs(gap - shifts[rank]) for rank, values in gaps.items() for gap in values)
    found.offsets = {rank: offset + shifts[rank] for rank, offset in found.offsets.items()}
    found.notes.append(
        f"the clocks of the ranks differ by up to {max(map(abs, shifts.values())) / 1e6:,.3f} ms: aligned by the ends "
        f"of {len(proving)} collectives, which then differ by up to {residual / 1e6:,.3f} ms"
    )
