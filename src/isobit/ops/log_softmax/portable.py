"""The portable executor of log-softmax, over pairs of maximum and sum."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.log_sum_exp import sum_pairs
from isobit.ops.portable.rounding import round_once, widen_rows
from isobit.ops.portable.sums import sum_last


def log_softmax(x: Tensor) -> Tensor:
    """Return (x − max) − log Σ exp(x − max) over the last axis."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = widen_rows(x).contiguous()
    total = sum_pairs(rows)
    return round_once((rows - total.max) - log_positive(total.sum), x.dtype).reshape(x.shape)


def log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return g − exp(y) Σ g; the product is rounded before it is subtracted."""
    if not y.numel():
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    rows, weights = widen_rows(grad), exp_nonpositive(widen_rows(y).contiguous())
    return round_once(rows - weights * sum_last(rows), y.dtype).reshape(y.shape)
