"""The portable executor of the rotary embedding: each product is rounded, then their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.rounding import round_once


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
