"""Sums in the order of addition, in plain torch operations: leaves, segments, products and rows.

Slow and exact. A native kernel must return the same bits; csrc/order.h is the C++ version of this file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from isobit.ops.portable.elementary import exp_nonpositive
from isobit.order.plan import LANES, FeaturePlan, Leaf, Segment
from isobit.order.samples import Samples
from isobit.order.tree import Counter, Node, merge

# Widening to the accumulation dtype, rounding a result once, and the one NaN that results may hold.


def widen(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of arithmetic: fp64 stays fp64, everything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def widen_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as rows [R, n] in the dtype of arithmetic."""
    return widen(tensor.reshape(-1, tensor.shape[-1]))


def round_once(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum to the result's dtype and replace every NaN by the one NaN of isobit's results.

    Code that merges sums of isobit's operators must round with this function and not with `Tensor.to`: torch writes
    the bf16 NaN 0xffff in vectors and 0x7fc0 in their tails, and keeps the sign and payload of an fp32 NaN, which
    depend on the order of operands.
    """
    return one_nan(total.to(dtype))


def one_nan(tensor: Tensor) -> Tensor:
    """Replace every NaN by the positive quiet NaN: which sign and payload survive depends on the order of operands."""
    return torch.where(tensor.isnan(), torch.nan, tensor)


def settle_nans(tensor: Tensor) -> Tensor:
    """Replace every NaN in place by the one of isobit's results (0x7fc00000, 0x7fc0, 0x7e00)."""
    return torch.nan_to_num(tensor, nan=torch.nan, posinf=torch.inf, neginf=-torch.inf, out=tensor)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c, rounded once to fp32; fp64 operands are multiplied and added in plain fp64.

    The product of two fp32 values is exact in fp64. The fp64 sum is rounded to odd, so that the second rounding, to
    fp32, gives the correctly rounded result.
    """
    if c.dtype == torch.float64:
        return a * b + c
    product, carried = a.double() * b.double(), c.double()
    total = product + carried
    back = total - product
    lost = (product - (total - back)) + (carried - back)
    even = (total.view(torch.int64) & 1) == 0
    inexact = torch.isfinite(total) & (lost != 0) & even
    toward = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where(inexact, torch.nextafter(total, toward), total).float()


def sum_leaf(leaf: Leaf, left: Tensor, right: Tensor) -> Tensor:
    """Return [R, C]: the ascending multiply-add chain of one leaf, for left [R, k] against right [C, k]."""
    total = left.new_zeros(left.shape[0], right.shape[0])
    for k in range(leaf.start, leaf.start + leaf.length):
        total = multiply_add(left[:, k, None], right[None, :, k], total)
    return total


def sum_striped(leaf: Leaf, rows: Tensor) -> Tensor:
    """Return [C], the plain sum over the rows [T, C] of one leaf: 16 interleaved chains, merged by the tree."""
    lanes = rows.new_zeros(LANES, rows.shape[1])
    for at in range(0, leaf.length, LANES):
        count = min(LANES, leaf.length - at)
        lanes[:count] += rows[leaf.start + at : leaf.start + at + count]
    return merge(list(lanes.unbind(0)), torch.add)


def merge_segments(
    segments: Sequence[Segment], sum_run: Callable[[Leaf], Any], first: int
) -> list[Any]:
    """Return the roots of consecutive segments: leaves are folded left, segments are merged by the tree.

    Args:
        segments: The leaves of each segment.
        sum_run: Returns the sum of one leaf.
        first: The index of the first segment in the whole sum, which decides what can be merged.
    """
    counter: Counter[Any] = Counter(operator.add)
    for index, segment in enumerate(segments):
        total: Any = None
        for leaf in segment:
            run = sum_run(leaf)
            total = total + run if leaf.fold and total is not None else run
        if total is not None:
            counter.push(Node(0, first + index), total)
    return [value for _, value in counter]


def sum_products(
    segments: Sequence[Segment], left: Tensor, right: Tensor, first: int = 0
) -> Tensor:
    """Return [roots, R, C]: left [R, k] against right [C, k]."""
    roots = merge_segments(segments, lambda leaf: sum_leaf(leaf, left, right), first)
    return one_nan(torch.stack(roots)) if roots else left.new_zeros(0, len(left), len(right))


def sum_rows(segments: Sequence[Segment], rows: Tensor, first: int = 0) -> Tensor:
    """Return [roots, C]: the sums over rows [T, C]."""
    roots = merge_segments(segments, lambda leaf: sum_striped(leaf, rows), first)
    return one_nan(torch.stack(roots)) if roots else rows.new_zeros(0, rows.shape[1])


def sum_last(terms: Tensor) -> Tensor:
    """Return [R, 1], the sums of terms [R, n] in the order of a feature axis."""
    return sum_rows(FeaturePlan(terms.shape[1]).segments, terms.t())[0].unsqueeze(1)


def mean_last(terms: Tensor) -> Tensor:
    """Return [R, 1], the means of terms [R, n]: the sum, then one division."""
    return sum_last(terms) / torch.tensor(terms.shape[1], dtype=terms.dtype)


def sum_samples(terms: Tensor, samples: Samples) -> Tensor:
    """Return [n], the sum of terms [tokens, n] in the order of the samples; zero where there is no sample."""
    roots = sum_rows(samples.segments, terms)
    return roots[0] if len(roots) else terms.new_zeros(terms.shape[1])


# Log-sum-exp in the order of addition: pairs (maximum, sum) that are merged like partial sums.


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
