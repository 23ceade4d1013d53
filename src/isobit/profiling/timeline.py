"""Export what was found as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing, with all ranks in one.

The traces themselves can be opened there too. This adds what they do not have: the cause of every nanosecond, waiting
told from moving in each collective, findings where they cost most, and ranks on one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from isobit.profiling.account import Books
from isobit.profiling.api import in_order, profile_traces
from isobit.profiling.collectives import match
from isobit.profiling.trace import Trace, steps_of

TRACKS = ("steps", "where the time goes", "collectives", "findings")


def timeline_of(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the timeline of the traces of one run, in the format of Chrome's traces.

    A process is a rank, and has a track for its steps, causes, collectives and findings. Times are microseconds since
    the first step, exact to the nanosecond.
    """
    traces = in_order(traces)
    profile = profile_traces(traces)
    steps = {trace.rank: steps_of(trace) for trace in traces}
    matched = match(traces, steps, profile.world)
    offsets = {trace.rank: -trace.base for trace in traces} if matched is None else matched.offsets
    begin = min(found[0].start - offsets[rank] for rank, found in steps.items())

    def piece(
        rank: int, track: str, name: str, start: int, end: int, **args: Any
    ) -> dict[str, Any]:
        at = start - offsets[rank] - begin
        times = {"ts": at / 1000, "dur": (end - start) / 1000}
        place = {"pid": rank, "tid": TRACKS.index(track)}
        return {"ph": "X", "cat": "isobit", "name": name, **place, **times, "args": args}

    events: list[dict[str, Any]] = []
    for trace in traces:
        rank = trace.rank
        events += names_of(rank)
        books = Books(trace)
        for step in steps[rank]:
            events.append(piece(rank, "steps", step.name, step.start, step.end))
            for start, end, cause in books.timeline.pieces(step.start, step.end):
                events.append(piece(rank, "where the time goes", cause, start, end))
    for one in profile.collectives:
        assert matched is not None
        slices = matched.meetings[one.number].slices
        for rank, found in slices.items():
            arrived = found.start + one.waits[rank]
            if one.waits[rank]:
                words = f"waits for rank {one.last}: {one.name}"
                why = {cause: ns / 1e6 for cause, ns in one.lateness.parts.items()}
                events.append(
                    piece(rank, "collectives", words, found.start, arrived, late_by_ms=why)
                )
            if one.moves[rank]:
                events.append(piece(rank, "collectives", f"moves: {one.name}", arrived, found.end))
    for finding in profile.findings:
        for shown in finding.evidence:
            said = {"detail": finding.detail, "remedy": finding.remedy}
            name = f"{finding.rule}: {shown.name}"
            events.append(
                piece(shown.rank, "findings", name, shown.start, shown.start + shown.ns, **said)
            )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def names_of(rank: int) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank's process and tracks."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, name in enumerate(TRACKS):
        place = {"pid": rank, "tid": number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
