"""How an extent is cut into segments and leaves: a function of the logical problem alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

VERSION = 1

# Constants of version 1. A change of any is a new version: docs/decisions, and new golden digests.
FEATURE_UNIT, FEATURE_CAP = 256, 16
SAMPLE_UNIT, SAMPLE_CAP = 1, 1024
LONG_SEGMENT, FEATURE_LEAF, TOKEN_LEAF, LANES = 1024, 512, 256, 16
ATTENTION_BLOCK = 64  # keys that a query folds at a time, cut at absolute positions of their sample; queries, backward


@dataclass(frozen=True)
class Leaf:
    """A run of consecutive elements summed by one chain; `fold` adds it to the segment's accumulator."""

    start: int
    length: int
    fold: bool


Segment = tuple[Leaf, ...]


def count_segments(extent: int, unit: int, cap: int) -> int:
    """The largest power of two that divides `extent`, leaves `unit` to each segment, and is at most `cap`."""
    count = 1
    while (
        extent > 0
        and count * 2 <= cap
        and extent % (count * 2) == 0
        and extent // (count * 2) >= unit
    ):
        count *= 2
    return count


def cut_into_leaves(start: int, length: int, leaf: int, fold: bool) -> Segment:
    """A run cut from its own start; an empty run is one empty leaf, since +0.0 is added for it."""
    if length == 0:
        return (Leaf(start, 0, fold),)
    return tuple(
        Leaf(start + at, min(leaf, length - at), fold or at > 0) for at in range(0, length, leaf)
    )


@dataclass(frozen=True)
class FeaturePlan:
    """The plan of a feature axis: the K of a product, the N of dX, a hidden size, a vocabulary."""

    extent: int

    @cached_property
    def count(self) -> int:
        """How many segments."""
        return count_segments(self.extent, FEATURE_UNIT, FEATURE_CAP)

    @property
    def length(self) -> int:
        """Elements of one segment."""
        return self.extent // self.count

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The leaves of every segment, in order."""
        leaf = FEATURE_LEAF if self.length > LONG_SEGMENT else max(self.length, 1)
        return tuple(
            cut_into_leaves(s * self.length, self.length, leaf, False) for s in range(self.count)
        )
