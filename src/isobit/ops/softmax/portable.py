"""The portable executor of softmax: the same order and the same exponential in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.rounding import round_once, widen_rows
from isobit.ops.portable.sums import sum_last


def softmax(x: Tensor) -> Tensor:
    """Return softmax over the last axis."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = widen_rows(x).contiguous()
    terms = exp_nonpositive(rows - rows.amax(1, keepdim=True))
    return round_once(terms / sum_last(terms), x.dtype).reshape(x.shape)


def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Return y (g − Σ y g); each product is rounded before it is added."""
    if not y.numel():
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    rows, weights = widen_rows(grad), widen_rows(y)
    return round_once(weights * (rows - sum_last(weights * rows)), y.dtype).reshape(y.shape)
