"""Planted wrong elementwise functions: other tails, other kernels for few elements, extra roundings, other formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library.stock import exact_gelu
from isobit.library.subjects import Subject
from isobit.ops.gelu.op import gelu
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu


def with_a_tail_of(function: Subject, other: Subject) -> Subject:
    """Compute the elements that do not fill sixteen lanes of a row by other code."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y, n = function(*given, **named), given[0].shape[-1]
        if n % 16:
            tail = [t[..., n // 16 * 16 :] if isinstance(t, Tensor) else t for t in given]
            y = torch.cat([y[..., : n // 16 * 16], other(*tail, **named)], -1)
        return y

    return wrong


def by_libm(x: Tensor) -> Tensor:
    """Return x times torch's sigmoid, in fp32."""
    return (x.float() * torch.sigmoid(x.float())).to(x.dtype)


def swiglu_by_libm(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate times torch's sigmoid times up, in fp32."""
    return (by_libm(gate.float()) * up.float()).to(up.dtype)


def by_error_function(x: Tensor, approximate: str = "none") -> Tensor:
    """Return the exact formulas in fp32."""
    return exact_gelu(x.float(), approximate).to(x.dtype)


silu_with_other_tail = with_a_tail_of(silu, by_libm)
gelu_with_other_tail = with_a_tail_of(gelu, by_error_function)
swiglu_with_other_tail = with_a_tail_of(swiglu, swiglu_by_libm)


def silu_in_small_batches_by_stock(x: Tensor) -> Tensor:
    """Use another kernel for few elements."""
    return F.silu(x) if x.numel() < 500 else silu(x)


def gelu_in_small_batches_by_stock(x: Tensor, approximate: str = "none") -> Tensor:
    """Use another kernel for few elements."""
    return F.gelu(x, approximate=approximate) if x.numel() < 500 else gelu(x, approximate)


def swiglu_in_small_batches_by_libm(gate: Tensor, up: Tensor) -> Tensor:
    """Use another kernel for few elements."""
    return swiglu_by_libm(gate, up) if gate.numel() < 500 else swiglu(gate, up)


def silu_rounded_between(x: Tensor) -> Tensor:
    """Round the logistic function to bf16."""
    return (x.float() * torch.sigmoid(x.float()).bfloat16().float()).to(x.dtype)


def gelu_rounded_between(x: Tensor, approximate: str = "none") -> Tensor:
    """Round the factor of x to bf16."""
    share = exact_gelu(x.double(), approximate) / x.double()
    return (x.float() * share.nan_to_num(0.5, 1.0, 0.0).bfloat16().float()).to(x.dtype)


def swiglu_rounded_between(gate: Tensor, up: Tensor) -> Tensor:
    """Round silu to bf16 before the product."""
    return (silu(gate).bfloat16().float() * up.float()).to(up.dtype)


def silu_too_steep(x: Tensor) -> Tensor:
    """Use the slope 1.702 of the sigmoid approximation of GELU."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def gelu_the_other(x: Tensor, approximate: str = "none") -> Tensor:
    """Exchange the exact function and its tanh approximation."""
    return gelu(x, "none" if approximate == "tanh" else "tanh")


def gelu_by_difference(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute 1 + erf in fp32, which is 0 below -5.6 and inaccurate above it."""
    return (0.5 * x.float() * (1 + torch.erf(x.float() / 2**0.5))).to(x.dtype)


def gelu_of_a_leaky_kind(x: Tensor, approximate: str = "none") -> Tensor:
    """Pass a hundredth of x below -3."""
    return torch.where(x < -3, x / 10, gelu(x, approximate))


def gelu_with_a_step(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x from 1.5 on less a hundredth, so that the value falls there."""
    y = gelu(x, approximate)
    return torch.where(x >= 1.5, y - 0.0625, y)


def gelu_above_x(x: Tensor, approximate: str = "none") -> Tensor:
    """Return two units of bf16 more than x above 4."""
    return torch.where(x > 4, x * 1.015625, gelu(x, approximate))


def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by the sigmoid alone, which is not 0 at 0."""
    return (torch.sigmoid(gate.float()) * up.float()).to(up.dtype)


def swiglu_with_a_limit(gate: Tensor, up: Tensor) -> Tensor:
    """Limit up to 7, as some models do."""
    return swiglu(gate, up.clamp(-7, 7))


def swiglu_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Exchange gate and up."""
    return swiglu(up, gate)


def by_lane(function: Subject) -> Subject:
    """Change every sixteenth element by a unit of bf16."""

    def wrong(*given: Any, **named: Any) -> Tensor:
        y = function(*given, **named).clone()
        y.view(-1)[3::16] *= 1.0078125
        return y

    return wrong


silu_off_by_lane, gelu_off_by_lane = by_lane(silu), by_lane(gelu)
swiglu_off_by_lane = by_lane(swiglu)
