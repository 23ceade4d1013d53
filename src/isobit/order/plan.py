"""How the extent of a sum is cut into segments and leaves.

[Note: the order of addition]
A sum over an axis is cut into a power of two of equal *segments*, which are added by a balanced tree. A segment
consists of *leaves*, which are added from left to right: 256 products of a chain of multiply-adds, 256 tokens of a
sample. A segment of a row sum is one leaf, added by 16 interleaved chains, and so is a segment of products on a
tensor core. The plan is a function of the extent: it does not depend on batch size, threads, ranks or the kernel, so
that every executor can add in the same order, and a rank or micro-batch with whole segments computes whole subtrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

VERSION = 2

# Constants of version 2. A change of any of them is a new version, with a decision record and new golden digests.
FEATURE_UNIT, FEATURE_CAP = 256, 8
SAMPLE_UNIT, SAMPLE_CAP = 1, 1024
LEAF, LANES = 256, 16
ATTENTION_BLOCK = 64  # keys per step of online softmax, counted from the start of the sample; queries, in backward
ATTENTION_CHUNK = 2048  # keys whose blocks are folded from an empty state; chunks are then merged from left to right


@dataclass(frozen=True)
class Leaf:
    """A run of consecutive elements with one chain; `fold` adds it to the segment's accumulator so far."""

    start: int
    length: int
    fold: bool


Segment = tuple[Leaf, ...]


def count_segments(extent: int, unit: int, cap: int) -> int:
    """Return the largest power of two that divides `extent`, leaves `unit` per segment, and is at most `cap`."""
    count = 1
    while (
        extent > 0
        and count * 2 <= cap
        and extent % (count * 2) == 0
        and extent // (count * 2) >= unit
    ):
        count *= 2
    return count


def cut_into_leaves(start: int, length: int, fold: bool) -> Segment:
    """Cut products or tokens into leaves; none of them is one empty leaf, for which +0.0 is added."""
    if length == 0:
        return (Leaf(start, 0, fold),)
    return tuple(
        Leaf(start + at, min(LEAF, length - at), fold or at > 0) for at in range(0, length, LEAF)
    )


@dataclass(frozen=True)
class FeaturePlan:
    """The plan of a feature axis: the K of a product, the N of its input gradient, a hidden size, a vocabulary.

    Example:
        >>> isobit.order.FeaturePlan(4096).count, isobit.order.FeaturePlan(12288).length
        (8, 1536)
    """

    extent: int

    @cached_property
    def count(self) -> int:
        """The number of segments."""
        return count_segments(self.extent, FEATURE_UNIT, FEATURE_CAP)

    @property
    def length(self) -> int:
        """The number of elements of one segment."""
        return self.extent // self.count

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a row sum in order, each with its only leaf."""
        return tuple((Leaf(s * self.length, self.length, False),) for s in range(self.count))

    @property
    def products(self) -> tuple[Segment, ...]:
        """The segments of a sum of products, cut into leaves."""
        return tuple(
            cut_into_leaves(s * self.length, self.length, False) for s in range(self.count)
        )
