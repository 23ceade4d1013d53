"""The schedule of recursive halving: which rank adds what to what, and in which round.

[Note: the reduction tree over ranks]
The sum over P ranks (P a power of two) is the balanced binary tree whose leaf r is rank r:
((0+1)+(2+3))+((4+5)+(6+7)) for P = 8. Recursive halving evaluates that tree in log2 P rounds. In
round i, rank r exchanges with its partner r XOR 2^i: each rank sends the half of its current
elements that the partner keeps, and adds what it receives. The lower rank's value is always the
left operand. After round i a rank has sums over 2^(i+1) consecutive ranks: over one subtree.

The usual form of recursive halving begins with the farthest partner; ours begins with the nearest,
because only then do the partial sums follow the tree above. 8 ranks, 8 elements e0..e7:

    rank | round 1: partner r^1 | round 2: partner r^2 | round 3: partner r^4 | owns the sum of
    -----|----------------------|----------------------|----------------------|----------------
      0  | 1, keeps e0..e3      | 2, keeps e0 e1       | 4, keeps e0          | e0
      1  | 0, keeps e4..e7      | 3, keeps e4 e5       | 5, keeps e4          | e4
      2  | 3, keeps e0..e3      | 0, keeps e2 e3       | 6, keeps e2          | e2
      3  | 2, keeps e4..e7      | 1, keeps e6 e7       | 7, keeps e6          | e6
      4  | 5, keeps e0..e3      | 6, keeps e0 e1       | 0, keeps e1          | e1
      5  | 4, keeps e4..e7      | 7, keeps e4 e5       | 1, keeps e5          | e5
      6  | 7, keeps e0..e3      | 4, keeps e2 e3       | 2, keeps e3          | e3
      7  | 6, keeps e4..e7      | 5, keeps e6 e7       | 3, keeps e7          | e7
    sums |  0+1, 2+3, 4+5, 6+7  |  (0+1)+(2+3), ...    |  the whole tree      |

The owners are bit-reversed (rank 1 = 001 owns e4 = 100), so that what a rank keeps or sends in a
round is one contiguous run. Each rank sends (P-1)/P of the data. An all-reduce then sends the sums
back through the same rounds in reverse order (recursive doubling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of the reduced tensor."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Round:
    """One exchange with another rank: this rank keeps the spans `kept` and sends `sent`."""

    peer: int
    is_left: bool  # this rank is the lower one, so its value is the left operand
    kept: tuple[Span, ...]
    sent: tuple[Span, ...]


@lru_cache(maxsize=1024)
def halving_rounds(rank: int, owned: tuple[Span, ...]) -> list[Round]:
    """Return the rounds of a rank, nearest partner first: [Note: the reduction tree over ranks].

    Args:
        rank: The rank in the group.
        owned: By rank, the span whose sum that rank has in the end; its length is a power of two.

    Example:
        >>> for step in halving_rounds(1, bit_reversed_spans(8, 8)):
        ...     print(step.peer, step.kept)
        0 (Span(start=4, stop=8),)
        3 (Span(start=4, stop=6),)
        5 (Span(start=4, stop=5),)
    """
    rounds = []
    distance = 1
    while distance < len(owned):
        # This rank still has the elements of the ranks that agree with it in the lower bits.
        below = range(rank % distance, len(owned), distance)
        kept = [owned[other] for other in below if other & distance == rank & distance]
        sent = [owned[other] for other in below if other & distance != rank & distance]
        rounds.append(Round(rank ^ distance, not rank & distance, _joined(kept), _joined(sent)))
        distance *= 2
    return rounds


@lru_cache(maxsize=1024)
def equal_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Return the owners of a reduce-scatter: rank r has the r-th of `ranks` equal shares."""
    edges = [elements * rank // ranks for rank in range(ranks + 1)]
    return tuple(Span(edges[rank], edges[rank + 1]) for rank in range(ranks))


@lru_cache(maxsize=1024)
def bit_reversed_spans(elements: int, ranks: int) -> tuple[Span, ...]:
    """Return the owners of an all-reduce: each round keeps and sends one contiguous run."""
    spans, bits = equal_spans(elements, ranks), ranks.bit_length() - 1
    return tuple(spans[int(format(rank, f"0{bits}b")[::-1], 2)] for rank in range(ranks))


def split_spans(spans: Sequence[Span], length: int) -> list[Span]:
    """Split spans into runs of at most `length` elements, alike on both ranks of a round."""
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
