"""The portable executor of softmax: the same order and the same exponential in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import (
    GPU_ROW_LENGTHS,
    ROW_LENGTHS,
    Call,
    call_native,
    cases_for,
    wide_values,
)
from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import round_once, sum_last, widen_rows


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


# Compare an executor's softmax with the portable one, bit for bit on hard rows.


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for extent in cases_for(call, ROW_LENGTHS, GPU_ROW_LENGTHS):
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = call("softmax", x)
        given = call("softmax_backward", grad, y)
        if not (bits.equal(y, softmax(x)) and bits.equal(given, softmax_backward(grad, y))):
            return f"softmax at extent {extent}"
    return None
