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

from isobit.profiling.account import Books
from isobit.profiling.bricks import collective_name, message_words
from isobit.profiling.records import Collective, Lateness
from isobit.profiling.trace import Event, Step, Trace

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


# Why the last rank of a collective was late: an exact sum over causes, against the median rank.
#
# [Note: Lateness as a sum]
# Let the last rank arrive at b and have left an earlier collective at a; the median rank at b' and
# a'. Then b - b' = (a - a') + (b - a) - (b' - a'), and each of the two intervals is the sum of its
# causes on the rank's timeline. So lateness is what the rank brought along, plus for each cause its
# time minus the median rank's. Nothing is estimated.

CARRIED = "left the collective before later"
BEGAN = "began the recording later"
OVERLAP = "arrived before the collective before had ended"
MOST_BACK = 64  # meetings that may overlap one


def judge(
    found: Matched, books: dict[int, Books], steps: dict[int, tuple[Step, ...]]
) -> tuple[Collective, ...]:
    """Return each collective with the waits of its ranks and the lateness of the last one."""
    judged = []
    chain: list[Meeting] = []  # meetings that do not overlap: their waits may be added
    for index, meeting in enumerate(found.meetings):
        arrivals = sorted(meeting.slices, key=lambda rank: (found.start(meeting, rank), rank))
        last, median = arrivals[-1], arrivals[(len(arrivals) - 1) // 2]
        at = found.start(meeting, last)
        waits = {
            rank: max(0, min(at, found.end(meeting, rank)) - found.start(meeting, rank))
            for rank in meeting.slices
        }
        moves = {rank: meeting.slices[rank].duration - wait for rank, wait in waits.items()}
        is_apart = not chain or all(
            found.start(meeting, rank) >= found.end(chain[-1], rank)
            for rank in meeting.slices
            if rank in chain[-1].slices
        )
        if is_apart:
            chain.append(meeting)
        before = meeting_before(found, index, last, median)
        judged.append(
            Collective(
                number=meeting.number,
                name=meeting.name,
                detail=meeting.detail,
                step=meeting.step,
                at=meeting.slices[last].start,
                last=last,
                waits=waits,
                moves=moves,
                lateness=lateness_of(found, meeting, before, last, median, books, steps),
                apart=is_apart,
            )
        )
    return tuple(judged)


def meeting_before(found: Matched, index: int, last: int, median: int) -> Meeting | None:
    """Return the latest meeting that both ranks had left when they arrived at this one."""
    meeting = found.meetings[index]
    for earlier in reversed(found.meetings[max(0, index - MOST_BACK) : index]):
        if all(
            rank in earlier.slices and found.end(earlier, rank) <= found.start(meeting, rank)
            for rank in (last, median)
        ):
            return earlier
    return None


def lateness_of(
    found: Matched,
    meeting: Meeting,
    before: Meeting | None,
    last: int,
    median: int,
    books: dict[int, Books],
    steps: dict[int, tuple[Step, ...]],
) -> Lateness:
    """Return how late the last rank was against the median one, and the causes, which add up to it."""
    begins = {
        rank: before.slices[rank].end if before is not None else steps[rank][0].start
        for rank in (last, median)
    }
    carried = (begins[last] - found.offsets[last]) - (begins[median] - found.offsets[median])
    parts = {CARRIED if before is not None else BEGAN: carried} if carried else {}
    for rank, sign in ((last, 1), (median, -1)):
        start, end = begins[rank], meeting.slices[rank].start
        spent = books[rank].timeline.parts(start, end) if end >= start else {OVERLAP: end - start}
        for cause, ns in spent.items():
            parts[cause] = parts.get(cause, 0) + sign * ns
    return Lateness(
        rank=last,
        against=median,
        ns=found.start(meeting, last) - found.start(meeting, median),
        parts={cause: ns for cause, ns in sorted(parts.items(), key=lambda part: -part[1]) if ns},
    )


def blamed(collectives: Sequence[Collective]) -> dict[int, int]:
    """Return how long all ranks together waited for each rank, the most waited for first."""
    found: dict[int, int] = {}
    for one in collectives:
        if one.waiting:
            found[one.last] = found.get(one.last, 0) + one.waiting
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def causes_of(collectives: Sequence[Collective], rank: int) -> dict[str, int]:
    """Return the causes of a rank's lateness in all collectives that do not overlap, added up.

    The first is that which makes it late in most steps: one long step may have any reason.
    """
    steps: dict[str, dict[str, int]] = {one.step: {} for one in collectives if one.apart}
    for one in collectives:
        if one.last == rank and one.apart:
            for cause, ns in one.lateness.parts.items():
                steps[one.step][cause] = steps[one.step].get(cause, 0) + ns
    found: dict[str, int] = {}
    for parts in steps.values():
        for cause, ns in parts.items():
            found[cause] = found.get(cause, 0) + ns

    def usual(cause: str) -> int:
        return statistics.median_high(parts.get(cause, 0) for parts in steps.values())

    return dict(sorted(found.items(), key=lambda part: (-usual(part[0]), -part[1])))


# Replay the ranks from collective to collective, to say what a change would save.
#
# Each rank computes for as long as it did, waits for the last one at every collective, and leaves
# it as long after that as it did. The replay must reproduce the recorded time before it may predict
# another.

ACCURACY = 0.01  # of the recorded time


class Replay:
    """The intervals of each rank between collectives that do not overlap and that all ranks join."""

    def __init__(
        self, found: Matched, apart: Sequence[Meeting], steps: dict[int, tuple[Step, ...]]
    ) -> None:
        self.ranks = sorted(steps)
        meetings = [meeting for meeting in apart if len(meeting.slices) == len(self.ranks)]
        self.starts = {rank: steps[rank][0].start - found.offsets[rank] for rank in self.ranks}
        ends = {rank: steps[rank][-1].end - found.offsets[rank] for rank in self.ranks}
        self.local: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        self.moving: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        at = dict(self.starts)
        for meeting in meetings:
            last = max(found.start(meeting, rank) for rank in self.ranks)
            for rank in self.ranks:
                self.local[rank].append(found.start(meeting, rank) - at[rank])
                self.moving[rank].append(found.end(meeting, rank) - last)
                at[rank] = found.end(meeting, rank)
        self.tails = {rank: ends[rank] - at[rank] for rank in self.ranks}
        self.recorded = max(ends.values()) - min(self.starts.values())

    def run(self, local: dict[int, list[int]], tails: dict[int, int] | None = None) -> int:
        """Return how long all ranks take with these intervals between collectives, and after the last one."""
        tails = self.tails if tails is None else tails
        at = dict(self.starts)
        for number in range(len(self.moving[self.ranks[0]])):
            last = max(at[rank] + local[rank][number] for rank in self.ranks)
            at = {rank: last + self.moving[rank][number] for rank in self.ranks}
        return max(at[rank] + tails[rank] for rank in self.ranks) - min(self.starts.values())

    @property
    def is_faithful(self) -> bool:
        """Whether the replay reproduces the recorded time, so that it may predict."""
        return abs(self.run(self.local) - self.recorded) <= ACCURACY * self.recorded

    def saved(self, rank: int) -> int | None:
        """Return what it would save if a rank took between collectives as long as the median of the others.

        None if the replay does not reproduce the recorded time.
        """
        if not self.is_faithful or len(self.ranks) < 2:
            return None
        others = [self.local[other] for other in self.ranks if other != rank]
        median = [int(statistics.median_low(values)) for values in zip(*others, strict=True)]
        changed = [min(own, usual) for own, usual in zip(self.local[rank], median, strict=True)]
        usual_tail = int(statistics.median_low(self.tails[r] for r in self.ranks if r != rank))
        tails = self.tails | {rank: min(self.tails[rank], usual_tail)}
        return self.run(self.local) - self.run(self.local | {rank: changed}, tails)
