"""The portable executor of log-softmax, over pairs of maximum and sum."""

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
from isobit.ops.portable.elementary import exp_nonpositive, log_positive
from isobit.ops.portable.sums import round_once, sum_last, sum_pairs, widen_rows


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


# Compare an executor's log-softmax with the portable one, bit for bit on hard rows.


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for extent in cases_for(call, ROW_LENGTHS, GPU_ROW_LENGTHS):
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = call("log_softmax", x)
        given = call("log_softmax_backward", grad, y)
        if not (bits.equal(y, log_softmax(x)) and bits.equal(given, log_softmax_backward(grad, y))):
            return f"log_softmax at extent {extent}"
    return None
