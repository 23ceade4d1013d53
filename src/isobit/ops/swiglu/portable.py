"""The portable executor of SwiGLU: the chain of operations of csrc/elements.cpp in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, special_values, wide_values
from isobit.ops.portable.elementary import logistic, sigmoid_and_slope
from isobit.ops.portable.sums import round_once, widen


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


# Compare an executor's SwiGLU with the portable one, bit for bit.

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    gate = special_values((5, EXTENT), dtype, generator)
    up, grad = (wide_values((5, EXTENT), dtype, generator) for _ in range(2))
    if not bits.equal(call("swiglu", gate, up), swiglu(gate, up)):
        return "swiglu"
    found = call("swiglu_backward", grad, gate, up)
    pairs = zip(found, swiglu_backward(grad, gate, up), strict=True)
    return None if all(bits.equal(a, b) for a, b in pairs) else "swiglu's gradient"
