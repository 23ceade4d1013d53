"""The portable executor of SiLU: the chain of operations of csrc/elements.cpp in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, special_values, wide_values
from isobit.ops.portable.elementary import logistic, sigmoid_and_slope
from isobit.ops.portable.sums import round_once, widen


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + e^-x)."""
    wide = widen(x).contiguous()
    return round_once(wide / logistic(wide)[1], x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return dx."""
    slope = sigmoid_and_slope(widen(x).contiguous())[1]
    return round_once(widen(grad) * slope, x.dtype).contiguous()


# Compare an executor's SiLU with the portable one, bit for bit.

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    x = special_values((5, EXTENT), dtype, generator)
    grad = wide_values((5, EXTENT), dtype, generator)
    if not bits.equal(call("silu", x), silu(x)):
        return "silu"
    found = call("silu_backward", grad, x)
    return None if bits.equal(found, silu_backward(grad, x)) else "silu's gradient"
