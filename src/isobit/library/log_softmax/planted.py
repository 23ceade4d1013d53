"""Planted wrong log-softmaxes, and planted wrong log-sum-exps that log-probabilities use too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add

import torch
from torch import Tensor

from isobit.library import stock
from isobit.library.gradients import with_value
from isobit.library.subjects import Subject
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import MaxSum, sum_pairs
from isobit.order.plan import FeaturePlan

LogSumExp = Callable[[Tensor], MaxSum]


def _cut_by_threads(logits: Tensor) -> MaxSum:
    """Sum a run of columns per thread, merged in order."""
    return reduce(add, [sum_pairs(part) for part in logits.chunk(torch.get_num_threads(), 1)])


def _not_rescaled(logits: Tensor) -> MaxSum:
    """Add the sum of a run as it is, though the maximum has changed."""
    plan = FeaturePlan(logits.shape[1])
    size = max(min(plan.length, 512), 1)
    parts = [sum_pairs(logits[:, at : at + size]) for at in range(0, logits.shape[1], size)]
    most = torch.stack([p.max for p in parts]).amax(0)
    return MaxSum(most, torch.stack([p.sum for p in parts]).sum(0))


def _without_the_tail(logits: Tensor) -> MaxSum:
    """Leave out the columns after the last whole vector."""
    whole = logits.shape[1] // 16 * 16
    if not whole:
        return sum_pairs(logits)
    return MaxSum(logits.amax(1, keepdim=True), sum_pairs(logits[:, :whole]).sum)


def _over_the_batch(logits: Tensor) -> MaxSum:
    """Subtract the largest logit of the whole batch."""
    most = logits.amax().reshape(1, 1).expand(len(logits), 1)
    terms = exp_nonpositive(logits - most)
    return MaxSum(most, terms.sum(1, keepdim=True).clamp(min=math.ldexp(1, -126)))


SUMS: dict[str, LogSumExp] = {
    "over_the_batch": _over_the_batch,
    "cut_by_threads": _cut_by_threads,
    "not_rescaled": _not_rescaled,
    "without_the_tail": _without_the_tail,
}


def with_sum(sum_of: LogSumExp) -> Subject:
    """Return a log-softmax with another log-sum-exp; its dx is right."""

    def function(x: Tensor, dim: int = -1) -> Tensor:
        right = log_softmax(x)
        if not x.numel():
            return right
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        total = sum_of(rows)
        wrong = ((rows - total.max) - log_positive(total.sum)).to(x.dtype).reshape(x.shape)
        return with_value(right, wrong)

    return function


over_the_batch, cut_by_threads, not_rescaled, without_the_tail = map(with_sum, SUMS.values())


def summed_backwards(x: Tensor, dim: int = -1) -> Tensor:
    """Sum in another order where there are few rows."""
    return log_softmax(x.flip(-1)).flip(-1) if x.shape[0] < 8 else log_softmax(x)


def log_of_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return log(softmax(x)), which is −inf where the softmax underflows."""
    return torch.log(torch.softmax(x, -1))


def of_zeros(x: Tensor, dim: int = -1) -> Tensor:
    """Replace a row without an answer by zeros."""
    return log_softmax(x).nan_to_num(0.0)


def a_hair_more(x: Tensor, dim: int = -1) -> Tensor:
    """Add 2^-15, as an epsilon inside the logarithm would."""
    return log_softmax(x) + 2.0**-15


def wiggling(x: Tensor, dim: int = -1) -> Tensor:
    """Fall by 0.5 between 1 and 1.01, where results should rise."""
    y = log_softmax(x)
    return torch.where((x > 1.0) & (x < 1.01), y - 0.5, y)


def plain_gradient(x: Tensor, dim: int = -1) -> Tensor:
    """Return the right values with stock's dx."""
    return with_value(stock.log_softmax(x), log_softmax(x.detach()))
