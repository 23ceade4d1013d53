"""SwiGLU's portable executor: the native chain of operations in plain torch ones."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.elements.elementary import logistic, widen
from isobit.ops.linear.portable import round_once
from isobit.ops.silu.portable import sigmoid_and_slope


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) times up, rounded once."""
    wide = widen(gate).contiguous()
    return round_once(wide / logistic(wide)[1] * widen(up), gate.dtype).contiguous()


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up."""
    upstream, wide = widen(grad), widen(gate).contiguous()
    s, slope = sigmoid_and_slope(wide)
    dgate = upstream * widen(up) * slope
    dup = upstream * (wide * s)
    return round_once(dgate, gate.dtype).contiguous(), round_once(dup, up.dtype).contiguous()
