"""SiLU's portable executor: the native chain of operations in plain torch ones."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.elements.elementary import logistic, sigmoid, widen
from isobit.ops.linear.portable import round_once


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    wide = widen(x).contiguous()
    return round_once(wide / logistic(wide)[1], x.dtype)


def sigmoid_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """The logistic function, and dy/dx, in the dtype of arithmetic."""
    s, rest = sigmoid(x)
    return s, s * (x * rest + 1.0)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """dx."""
    slope = sigmoid_and_slope(widen(x).contiguous())[1]
    return round_once(widen(grad) * slope, x.dtype).contiguous()
