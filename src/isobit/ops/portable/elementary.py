"""exp, log, tanh, the logistic function and the normal distribution: one result per value, on every machine.

Each is a fixed chain of torch operations that are never fused, and gives the bits of csrc/exponential.h, logarithm.h
and elementary.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Exponential:
    """Constants for one dtype of e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + (r + r² q(r))."""

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
    """Return exp(x) for x <= 0 by the chain of operations of csrc/exponential.h; none of them is fused."""
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


ROOT_HALF = float.fromhex("0x1.6a09e6p-1")
LN2, LN2_REST = (
    float.fromhex("0x1.63p-1"),
    float.fromhex("-0x1.bd0106p-13"),
)  # ln 2 in two parts
LOG_P = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)


def log_positive(x: Tensor) -> Tensor:
    """Return log(x) of fp32 values of at least 2^-126; fp64, which is for gradcheck, uses torch.log."""
    if x.dtype == torch.float64:
        return torch.log(x)
    bits = x.contiguous().view(torch.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = mantissa < ROOT_HALF
    whole = (((bits >> 23) & 0x1FF) - 126).float()
    n = torch.where(small, whole - 1.0, whole)
    f = torch.where(small, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    p = f * LOG_P[0] + LOG_P[1]
    for coefficient in LOG_P[2:]:
        p = p * f + coefficient
    rest = ((p * f) * z + n * LN2_REST) - 0.5 * z
    return torch.where(x - x == 0, (f + rest) + n * LN2, x)


# tanh of |x| < NEAR is x + x³ p(x²), the highest power first; beyond it 1 − 2e / (1 + e), with e = exp(−2 |x|).
NEAR = 0.625
TANH_P = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of fp32 values; fp64, which is for gradcheck, uses torch.tanh."""
    if x.dtype == torch.float64:
        return torch.tanh(x)
    size = x.abs()
    e = exp_nonpositive(size * -2.0)
    far = 1.0 - (e + e) / (e + 1.0)
    square = size * size
    p = square * TANH_P[0] + TANH_P[1]
    for coefficient in TANH_P[2:]:
        p = p * square + coefficient
    return torch.copysign(torch.where(size < NEAR, (p * square) * size + size, far), x)


def soft_cap(x: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return cap · tanh(x / cap) and its derivative, 1 − tanh²."""
    # On the device of x: a GPU multiplies by the reciprocal of a number of the host, which rounds twice.
    limit = torch.tensor(cap, dtype=x.dtype, device=x.device)
    bent = tanh(x / limit)
    return bent * limit, 1.0 - bent * bent


# Up to here the chain of the exponential is valid for positive arguments, and 1 / (1 + e^-x) is not subnormal.
HIGHEST = {torch.float32: 87.25, torch.float64: 708.0}
FARTHEST = {torch.float32: 16.0, torch.float64: 40.0}  # the normal density is +0 there
AT_ZERO = float.fromhex("0x1.9884533d43651p-2")  # 1 / sqrt(2 pi); fp32 takes it rounded
# The tail of the normal distribution beyond a is e^(-a²/2) t (2 + u p(u)), t = 1 / (a + 4), u = a t; the highest power
# first. Relative errors of the fits: 8.3e-9 and 2.8e-14.
TAIL_P32 = (
    "-0x1.0439a2p-4 0x1.57c3b8p-2 -0x1.23a7acp-1 0x1.5e7f70p-4 0x1.496370p-1 0x1.3e4ffep-2 -0x1.98dab8p+1 "
    "0x1.4ef932p+2 -0x1.18845ep+2"
)
TAIL_P64 = (
    "-0x1.b2cf68519df6ep-8 0x1.8a4a6c1cdfe28p-5 -0x1.44026703327dfp-3 0x1.4d3d9df2ab61fp-2 -0x1.fcfdcc63b01dbp-2 "
    "0x1.370812e4879e3p-1 -0x1.2595f57ef88b4p-1 0x1.a0a0a9695034ep-2 -0x1.0882fe7bee54ap-2 0x1.119b7c7518e37p-3 "
    "0x1.10a8bba52002ep-5 0x1.f8522f36cb01cp-8 -0x1.c20348d40549ep-3 -0x1.ebbd5523e03fcp-4 0x1.6e9877622848ep-1 "
    "0x1.2e7ca6978590bp-2 -0x1.989d6be4b6432p+1 0x1.4ef7598703b28p+2 -0x1.1884533d469eep+2"
)
TAIL_P = {
    dtype: tuple(map(float.fromhex, text.split()))
    for dtype, text in ((torch.float32, TAIL_P32), (torch.float64, TAIL_P64))
}


def logistic(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^-x and 1 + e^-x, the denominator of the logistic function."""
    e = torch.where(-x > HIGHEST[x.dtype], torch.inf, exp_nonpositive(-x))
    return e, e + 1.0


def sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return s = 1 / (1 + e^-x) and 1 - s; the latter is a difference only where that loses no digits."""
    e, total = logistic(x)
    s = 1.0 / total
    return s, torch.where(x >= 0, e * s, 1.0 - s)


def normal_share(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard normal distribution function and its density at x."""
    a = x.abs()
    a = torch.where(a > FARTHEST[x.dtype], FARTHEST[x.dtype], a)
    e = exp_nonpositive(a * a * -0.5)
    t = 1.0 / (a + 4.0)
    u = a * t
    p = torch.full_like(u, TAIL_P[x.dtype][0])
    for coefficient in TAIL_P[x.dtype][1:]:
        p = p * u + coefficient
    beyond = e * (t * (u * p + 2.0))
    return torch.where(x >= 0, 1.0 - beyond, beyond), e * AT_ZERO


def sigmoid_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logistic function s of x, and the derivative of x · s."""
    s, rest = sigmoid(x)
    return s, s * (x * rest + 1.0)
