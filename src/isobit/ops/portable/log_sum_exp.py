"""Log-sum-exp in the order of addition: pairs (maximum, sum) that are merged like partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import merge_segments, sum_striped
from isobit.order.plan import FeaturePlan, Leaf, Segment


class MaxSum:
    """The maxima [R, 1] of some columns and the sums of exp(x − maximum); `+` rescales to the larger maximum."""

    def __init__(self, max: Tensor, sum: Tensor) -> None:
        self.max, self.sum = max, sum

    def __add__(self, other: MaxSum) -> MaxSum:
        most = torch.maximum(self.max, other.max)
        base = finite_or_zero(most)
        left, right = exp_nonpositive(self.max - base), exp_nonpositive(other.max - base)
        return MaxSum(most, self.sum * left + other.sum * right)


class Pair(MaxSum):
    """A `MaxSum` that keeps the left one of two zeros, as the kernel of linear_logprob does.

    The sign of torch.maximum(+0, -0) depends on the position in the vector.
    """

    def __add__(self, other: MaxSum) -> Pair:
        return Pair(
            torch.where(self.max < other.max, other.max, self.max), super().__add__(other).sum
        )


Kind = TypeVar("Kind", bound=MaxSum)


def finite_or_zero(most: Tensor) -> Tensor:
    """Return what is subtracted before exp: the maximum, or 0 where there is none."""
    return torch.where(most == -torch.inf, 0.0, most)


def merge_pairs(rows: Tensor, segments: Sequence[Segment], kind: type[Kind]) -> Kind:
    """Return the pair of all columns of rows [R, n]: a pair for each of the segments, merged by the tree."""

    def of_segment(leaf: Leaf) -> Kind:
        part = rows[:, leaf.start : leaf.start + leaf.length]
        known = torch.where(part.isnan(), -torch.inf, part)  # the sum takes up the NaN
        most = known.amax(1, keepdim=True)
        terms = exp_nonpositive(part - finite_or_zero(most))
        return kind(most, sum_striped(Leaf(0, leaf.length, False), terms.t()).unsqueeze(1))

    (total,) = merge_segments(segments, of_segment, 0)
    return total  # type: ignore[no-any-return]


def sum_pairs(rows: Tensor) -> MaxSum:
    """Return the pair of all columns of rows [R, n], in the order of a feature axis."""
    return merge_pairs(rows, FeaturePlan(rows.shape[1]).segments, MaxSum)
