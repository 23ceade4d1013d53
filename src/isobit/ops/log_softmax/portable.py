"""The log-sum-exp's pairs and log-softmax in plain torch operations: the same order, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import merge_segments, round_once, sum_striped, widen
from isobit.ops.logarithm import log_positive
from isobit.ops.softmax.portable import exp_nonpositive, sum_last
from isobit.order.plan import FeaturePlan, Leaf


class MaxSum:
    """Of some columns: [R, 1] maxima, and the sums of exp(x − maximum); `+` rescales to the larger maximum."""

    def __init__(self, max: Tensor, sum: Tensor) -> None:
        self.max, self.sum = max, sum

    def __add__(self, other: MaxSum) -> MaxSum:
        most = torch.maximum(self.max, other.max)
        base = finite_or_zero(most)
        left, right = exp_nonpositive(self.max - base), exp_nonpositive(other.max - base)
        return MaxSum(most, self.sum * left + other.sum * right)


def finite_or_zero(most: Tensor) -> Tensor:
    """What is subtracted: nothing, where there is no maximum."""
    return torch.where(most == -torch.inf, 0.0, most)


def sum_pairs(rows: Tensor) -> MaxSum:
    """Over the columns of rows [R, n], in the order of a feature axis."""

    def of_leaf(leaf: Leaf) -> MaxSum:
        part = rows[:, leaf.start : leaf.start + leaf.length]
        known = torch.where(part.isnan(), -torch.inf, part)  # a NaN is met by the sum
        most = known.amax(1, keepdim=True)
        terms = exp_nonpositive(part - finite_or_zero(most))
        return MaxSum(most, sum_striped(Leaf(0, leaf.length, False), terms.t()).unsqueeze(1))

    (total,) = merge_segments(FeaturePlan(rows.shape[1]).segments, of_leaf, 0)
    return total  # type: ignore[no-any-return]


def log_softmax(x: Tensor) -> Tensor:
    """Over the last axis: (x − max) − log Σ exp(x − max)."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = widen(x).contiguous()
    total = sum_pairs(rows)
    return round_once((rows - total.max) - log_positive(total.sum), x.dtype).reshape(x.shape)


def log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """g − exp(y) Σg: the product is rounded before it is subtracted."""
    if not y.numel():
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    rows, weights = widen(grad), exp_nonpositive(widen(y).contiguous())
    return round_once(rows - weights * sum_last(rows), y.dtype).reshape(y.shape)
