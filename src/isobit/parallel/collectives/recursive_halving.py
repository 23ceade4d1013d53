"""The tree of ranks as meetings of two: rank r meets r^1, then r^2, r^4, …; each gives half of what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the exchanged tensor."""

    start: int
    stop: int


@dataclass(frozen=True)
class Meeting:
    """Two ranks add what both hold: one keeps these spans, the other those. The lower rank's value stands left."""

    peer: int
    is_left: bool
    kept: tuple[Span, ...]
    given: tuple[Span, ...]

    @property
    def longest(self) -> int:
        """Elements of the longer way: halves of an odd number differ, and both must choose alike who sends first."""
        return max(
            sum(span.stop - span.start for span in spans) for spans in (self.kept, self.given)
        )


@lru_cache(maxsize=1024)
def meet(rank: int, owned: tuple[Span, ...]) -> list[Meeting]:
    """All meetings of a rank, in order; `owned` says by rank whose sum each span is in the end.

    After the first a rank holds sums of 2 neighbours, then of 4: the balanced tree, neighbours first. What is sent
    halves each time: (P−1)/P of the data in log2 P meetings, and the nearest ranks exchange the most.
    """
    found = []
    distance = 1
    while distance < len(owned):
        below = range(rank % distance, len(owned), distance)
        kept = [owned[other] for other in below if other & distance == rank & distance]
        given = [owned[other] for other in below if other & distance != rank & distance]
        found.append(Meeting(rank ^ distance, not rank & distance, _joined(kept), _joined(given)))
        distance *= 2
    return found


@lru_cache(maxsize=1024)
def equal_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Rank r owns the r-th of P shares, as reduce-scatter hands them out."""
    edges = [elements * rank // ranks for rank in range(ranks + 1)]
    return tuple(Span(edges[rank], edges[rank + 1]) for rank in range(ranks))


@lru_cache(maxsize=1024)
def folded_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Shares whose owners are such that all which a rank keeps or gives in one meeting lies together."""
    spans, bits = equal_spans(elements, ranks), ranks.bit_length() - 1
    return tuple(spans[int(format(rank, f"0{bits}b")[::-1], 2)] for rank in range(ranks))


def cut_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """The same elements in runs of at most `length`, which both sides of a meeting cut alike."""
    return [
        Span(at, min(at + length, span.stop))
        for span in spans
        for at in range(span.start, span.stop, length)
    ]


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in sorted((s for s in spans if s.start < s.stop), key=lambda s: s.start):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
