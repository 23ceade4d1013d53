"""The rotary embedding's portable executor: each product rounded, then their sum, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import round_once


def halves(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The first and the second half of the last axis, in the dtype of arithmetic."""
    return t.to(torch.float64 if dtype == torch.float64 else torch.float32).chunk(2, -1)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (low, high) turned by the token's angles."""
    low, high = halves(x, x.dtype)
    (cos_low, cos_high), (sin_low, sin_high) = (
        halves(t.unsqueeze(-2), x.dtype) for t in (cos, sin)
    )
    turned = torch.cat([low * cos_low - high * sin_low, high * cos_high + low * sin_high], -1)
    return round_once(turned, x.dtype).contiguous()


def rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dx: by the transpose of the turn."""
    low, high = halves(grad, grad.dtype)
    (cos_low, cos_high), (sin_low, sin_high) = (
        halves(t.unsqueeze(-2), grad.dtype) for t in (cos, sin)
    )
    turned = torch.cat([low * cos_low + high * sin_high, high * cos_high - low * sin_low], -1)
    return round_once(turned, grad.dtype).contiguous()
