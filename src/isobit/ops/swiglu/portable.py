"""The portable executor of SwiGLU: the chain of operations of csrc/elements.cpp in plain torch operations."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.portable.elementary import logistic, sigmoid_and_slope
from isobit.ops.portable.rounding import round_once, widen


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, rounded once."""
    wide = widen(gate).contiguous()
    return round_once(wide / logistic(wide)[1] * widen(up), gate.dtype).contiguous()


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and of up."""
    upstream, wide = widen(grad), widen(gate).contiguous()
    s, slope = sigmoid_and_slope(wide)
    dgate = upstream * widen(up) * slope
    dup = upstream * (wide * s)
    return round_once(dgate, gate.dtype).contiguous(), round_once(dup, up.dtype).contiguous()
