"""Replay the ranks from collective to collective, to say what a change would save.

Each rank computes for as long as it did, waits for the last one at every collective, and leaves it as long after that
as it did. The replay must reproduce the recorded time before it may predict another.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from isobit.profiling.collectives import Matched, Meeting
from isobit.profiling.steps import Step

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

    def run(self, local: dict[int, list[int]]) -> int:
        """Return how long all ranks take with these intervals between collectives."""
        at = dict(self.starts)
        for number in range(len(self.moving[self.ranks[0]])):
            last = max(at[rank] + local[rank][number] for rank in self.ranks)
            at = {rank: last + self.moving[rank][number] for rank in self.ranks}
        return max(at[rank] + self.tails[rank] for rank in self.ranks) - min(self.starts.values())

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
        return self.run(self.local) - self.run(self.local | {rank: changed})
