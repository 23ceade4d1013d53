"""The portable executor as a subject of rmsnorm-kernel-v1, and planted wrong root-mean-square norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.rms_norm import portable
from isobit.ops.rms_norm.op import rms_norm


def portable_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Return the portable executor's result: the same order in plain torch operations."""
    return portable.rms_norm(x, weight, eps)[0]


# ---- planted --------------------------------------------------------------------------------------------


def scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Finish a norm: scale, weight, one rounding."""
    return ((x.float() * scale) * weight.float()).to(x.dtype)


def eps_outside(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Add eps to the root."""
    return scaled(x, weight, 1 / (x.float().square().mean(-1, keepdim=True).sqrt() + eps))


def over_the_batch(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Take the mean square of all rows together."""
    return scaled(x, weight, (x.float().square().mean() + eps).rsqrt())


def bf16_accumulator(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Add the squares in bf16."""
    total = torch.zeros_like(x[..., :1], dtype=torch.bfloat16)
    for column in x.float().square().bfloat16().unbind(-1):
        total = total + column.unsqueeze(-1)
    return scaled(x, weight, (total.float() / x.shape[-1] + eps).rsqrt())


def without_the_last(x: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> Tensor:
    """Leave the last element out of the mean."""
    mean = x[..., :-1].float().square().sum(-1, keepdim=True) / x.shape[-1]
    return scaled(x, weight, (mean + eps).rsqrt())


def summed_backwards(x: Tensor, weight: Tensor, eps: float = 1e-6, **named: Any) -> Tensor:
    """Sum in another order where there are few rows."""
    if x.shape[0] >= 8:
        return rms_norm(x, weight, eps, **named)
    return rms_norm(x.flip(-1), weight.flip(-1), eps, **named).flip(-1)
