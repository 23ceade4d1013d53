"""Cut a process's time into pieces that each have exactly one cause, so that the parts of any window add up to it.

[Note: One cause for every nanosecond]
Slices overlap: a kernel runs while a collective runs on another stream and the host is in three nested calls. Layers
put the causes in order, and each nanosecond belongs to the first layer that covers it: compute hides communication,
communication hides copies, work of the device hides whatever the host does. What no layer covers is `UNRECORDED`. The
pieces tile the axis by construction, in integer nanoseconds, so the parts of a window add up to its length, and the
parts of adjacent windows to those of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

UNRECORDED = "idle: nothing recorded"
Interval = tuple[int, int]


class Timeline:
    """Pieces of time with their causes: piece i is [edges[i], edges[i + 1]) and has cause `causes[i]`."""

    def __init__(self, layers: Sequence[tuple[str, Iterable[Interval]]]) -> None:
        self.names = (*(name for name, _ in layers), UNRECORDED)
        changes: list[tuple[int, int, int]] = []
        for index, (_, intervals) in enumerate(layers):
            for start, end in union(intervals):
                changes += [(start, index, 1), (end, index, -1)]
        changes.sort()
        self.edges: list[int] = []
        self.causes: list[int] = []
        covering = [0] * len(layers)
        for at, index, change in changes:
            covering[index] += change
            cause = next((i for i, count in enumerate(covering) if count), len(layers))
            if self.edges and self.edges[-1] == at:
                self.causes[-1] = cause
            elif not self.causes or self.causes[-1] != cause:
                self.edges.append(at)
                self.causes.append(cause)

    def pieces(self, start: int, end: int) -> Iterable[tuple[int, int, str]]:
        """Yield (start, end, cause) of the pieces of a window, in order; they tile it."""
        index = bisect_right(self.edges, start) - 1
        while start < end:
            cause = self.causes[index] if index >= 0 else len(self.names) - 1
            stop = min(end, self.edges[index + 1]) if index + 1 < len(self.edges) else end
            if stop > start:
                yield start, stop, self.names[cause]
            start, index = stop, index + 1

    def parts(self, start: int, end: int) -> dict[str, int]:
        """Return the nanoseconds of each cause in a window; causes without any are left out."""
        found: dict[str, int] = {}
        for begin, stop, cause in self.pieces(start, end):
            found[cause] = found.get(cause, 0) + stop - begin
        return {name: found[name] for name in self.names if name in found}


def tiles(slices: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return (start, end, number) of disjoint tiles that cover what slices (start, end, number) cover.

    Where several slices run at once, the one that started last has the tile: the innermost of nested ones.
    """
    waiting = sorted((start, -end, number) for start, end, number in slices if end > start)
    edges = sorted({start for start, _, _ in waiting} | {-end for _, end, _ in waiting})
    running: list[tuple[int, int, int]] = []  # the one that started last on top, by negated place
    found: list[tuple[int, int, int]] = []
    place = 0
    for start, end in pairwise(edges):
        while place < len(waiting) and waiting[place][0] <= start:
            heappush(running, (-place, -waiting[place][1], waiting[place][2]))
            place += 1
        while running and running[0][1] <= start:
            heappop(running)
        if running:
            found.append((start, end, running[0][2]))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def covered(merged: Sequence[Interval], start: int, end: int) -> int:
    """Return how many nanoseconds of a window merged intervals cover."""
    index, found = max(bisect_right(merged, (start, start)) - 1, 0), 0
    while index < len(merged) and merged[index][0] < end:
        found += max(0, min(merged[index][1], end) - max(merged[index][0], start))
        index += 1
    return found
