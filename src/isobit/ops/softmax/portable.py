"""Softmax's portable executor: the same order and the same exponential in plain torch operations."""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import torch
from torch import Tensor

from isobit.ops.linear.portable import round_once, sum_rows, widen
from isobit.order.plan import FeaturePlan


@dataclass(frozen=True)
class Exponential:
    """The constants of e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + (r + r² q(r)), in one dtype."""

    lowest: float  # below it the result is +0
    octave: float  # ln 2 in two parts; n times the first is exact
    octave_rest: float
    to_integer: float  # rounds to an integer n; the low bits are n's exponent, biased
    q: tuple[float, ...]  # the highest power first
    integer: torch.dtype
    mantissa_bits: int


PER_OCTAVE = float.fromhex("0x1.71547652b82fep+0")  # 1 / ln 2; fp32 takes it rounded
# Those of csrc/exponential.h; every one is an fp32 value.
FP32 = Exponential(
    lowest=float.fromhex("-0x1.5d589ep+6"),
    octave=float.fromhex("0x1.62e4p-1"),
    octave_rest=float.fromhex("0x1.7f7d1cp-20"),
    to_integer=1.5 * 2.0**23 + 127,
    q=tuple(
        float.fromhex(c)
        for c in (
            "0x1.6a23ccp-10",
            "0x1.123a20p-7",
            "0x1.5558f2p-5",
            "0x1.555492p-3",
            "0x1.fffffcp-2",
        )
    ),
    integer=torch.int32,
    mantissa_bits=23,
)
FP64 = Exponential(
    lowest=-708.0,
    octave=float.fromhex("0x1.62e42feep-1"),
    octave_rest=float.fromhex("0x1.a39ef35793c76p-33"),
    to_integer=1.5 * 2.0**52 + 1023,
    q=tuple(1 / factorial(k) for k in range(14, 1, -1)),
    integer=torch.int64,
    mantissa_bits=52,
)


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp, by the chain of operations of csrc/exponential.h: none is fused, so each value has one result."""
    c = FP64 if x.dtype == torch.float64 else FP32
    shifted = x * PER_OCTAVE + c.to_integer
    n = shifted - c.to_integer
    r = (x - n * c.octave) - n * c.octave_rest
    q = torch.full_like(r, c.q[0])
    for coefficient in c.q[1:]:
        q = q * r + coefficient
    mantissa = (r + r * r * q) + 1.0
    scale = (shifted.view(c.integer) << c.mantissa_bits).view(x.dtype)
    return torch.where(x < c.lowest, 0.0, mantissa * scale)


def sum_last(terms: Tensor) -> Tensor:
    """[R, 1] of terms [R, n], in the order of a feature axis."""
    return sum_rows(FeaturePlan(terms.shape[1]).segments, terms.t())[0].unsqueeze(1)


def softmax(x: Tensor) -> Tensor:
    """Over the last axis."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = widen(x).contiguous()
    terms = exp_nonpositive(rows - rows.amax(1, keepdim=True))
    return round_once(terms / sum_last(terms), x.dtype).reshape(x.shape)


def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """y (g - Σ y g): each product is rounded before it is added."""
    if not y.numel():
        return torch.empty_like(y, memory_format=torch.contiguous_format)
    rows, weights = widen(grad), widen(y)
    return round_once(weights * (rows - sum_last(weights * rows)), y.dtype).reshape(y.shape)
