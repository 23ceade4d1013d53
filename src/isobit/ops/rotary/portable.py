"""The portable executor of the rotary embedding: each product is rounded, then their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, wide_values
from isobit.ops.portable.sums import round_once


def halves(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the first and the second half of the last axis, in the accumulation dtype."""
    return t.to(torch.float64 if dtype == torch.float64 else torch.float32).chunk(2, -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (low, high) by the angles of their token."""
    low, high = halves(x, x.dtype)
    (cos_low, cos_high), (sin_low, sin_high) = (
        halves(t.unsqueeze(-2), x.dtype) for t in (cos, sin)
    )
    rotated = torch.cat([low * cos_low - high * sin_low, high * cos_high + low * sin_high], -1)
    return round_once(rotated, x.dtype).contiguous()


def rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return dx: the rotation by the opposite angles."""
    low, high = halves(grad, grad.dtype)
    (cos_low, cos_high), (sin_low, sin_high) = (
        halves(t.unsqueeze(-2), grad.dtype) for t in (cos, sin)
    )
    rotated = torch.cat([low * cos_low + high * sin_high, high * cos_high - low * sin_low], -1)
    return round_once(rotated, grad.dtype).contiguous()


# Compare an executor's rotary embedding with the portable one, bit for bit.

HEADS, D = 3, 42  # half a head has a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(D)
    x = wide_values((5, HEADS, D), dtype, generator)
    angles = torch.randn(5, D, generator=generator, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if not bits.equal(call("rotary", x, cos, sin), rotary(x, cos, sin)):
        return "rotary"
    found = call("rotary_backward", x, cos, sin)
    return None if bits.equal(found, rotary_backward(x, cos, sin)) else "rotary's gradient"
