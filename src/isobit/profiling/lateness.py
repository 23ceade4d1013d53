"""Why the last rank of a collective was late: an exact sum over causes, against the median rank.

[Note: Lateness as a sum]
Let the last rank arrive at b and have left an earlier collective at a; the median rank at b' and a'. Then
b - b' = (a - a') + (b - a) - (b' - a'), and each of the two intervals is the sum of its causes on the rank's timeline.
So lateness is what the rank brought along, plus for each cause its time minus the median rank's. Nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence

from isobit.profiling.account import Books
from isobit.profiling.collectives import Matched, Meeting
from isobit.profiling.records import Collective, Lateness
from isobit.profiling.steps import Step

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
    """Return the causes of a rank's lateness in all collectives that do not overlap, added up."""
    found: dict[str, int] = {}
    for one in collectives:
        if one.last == rank and one.apart:
            for cause, ns in one.lateness.parts.items():
                found[cause] = found.get(cause, 0) + ns
    return dict(sorted(found.items(), key=lambda part: -part[1]))
