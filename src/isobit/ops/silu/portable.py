"""The portable executor of SiLU: the chain of operations of csrc/elements.cpp in plain torch operations."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.portable.elementary import logistic, sigmoid_and_slope
from isobit.ops.portable.rounding import round_once, widen


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + e^-x)."""
    wide = widen(x).contiguous()
    return round_once(wide / logistic(wide)[1], x.dtype)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return dx."""
    slope = sigmoid_and_slope(widen(x).contiguous())[1]
    return round_once(widen(grad) * slope, x.dtype).contiguous()
