"""How the extent of a sum is cut into segments and leaves.

[Note: the order of addition]
A sum over an axis is cut into a power of two of equal *segments*, which are added by a balanced tree. A segment of a
feature axis is one *leaf*: it is added by one chain, or by 16 interleaved chains. A segment of the sample axis consists
of leaves of tokens, which are added from left to right. The plan is a function of the extent: it does not depend on
batch size, threads, ranks or the kernel, so that every executor can add in the same order, and a rank or micro-batch
with whole segments computes whole subtrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

VERSION = 2

# Constants of version 2. A change of any of them is a new version, with a decision record and new golden digests.
FEATURE_UNIT, FEATURE_CAP = 256, 8
SAMPLE_UNIT, SAMPLE_CAP = 1, 1024
TOKEN_LEAF, LANES = 256, 16
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


def cut_tokens(start: int, length: int, fold: bool) -> Segment:
    """Cut the tokens of a sample into leaves; a sample without tokens is one empty leaf, for which +0.0 is added."""
    if length == 0:
        return (Leaf(start, 0, fold),)
    return tuple(
        Leaf(start + at, min(TOKEN_LEAF, length - at), fold or at > 0)
        for at in range(0, length, TOKEN_LEAF)
    )


@dataclass(frozen=True)
class FeaturePlan:
    """The plan of a feature axis: the K of a product, the N of its input gradient, a hidden size, a vocabulary."""

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
        """The segments in order, each with its only leaf."""
        return tuple((Leaf(s * self.length, self.length, False),) for s in range(self.count))
