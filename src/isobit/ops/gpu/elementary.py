"""exp, log, tanh, the logistic function, the normal distribution and the one NaN: the operations of csrc, one by one.

The chains are those of csrc/exponential.h, logarithm.h and elementary.h, and of isobit/ops/portable/elementary.py.

None of the operations may be fused: compile with `enable_fp_fusion=False`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp_nonpositive(x: tl.tensor) -> tl.tensor:
    """Return exp(x) for fp32 x <= 0; results below 2^-126 are +0, and a NaN stays NaN."""
    shifted = x * 1.4426950216293335 + 12583039.0
    n = shifted - 12583039.0
    r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
    q = 0.001381453825160861 * r + 0.00836874544620514
    q = q * r + 0.04166838899254799
    q = q * r + 0.1666652113199234
    q = q * r + 0.4999999403953552
    mantissa = (r + r * r * q) + 1.0
    scale = (shifted.to(tl.uint32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.33654022216797, 0.0, mantissa * scale)


@triton.jit
def log_positive(x: tl.tensor) -> tl.tensor:
    """Return log(x) of fp32 x of at least 2^-126; a NaN stays NaN, and +inf stays +inf."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [1/2, 1)
    small = mantissa < 0.7071067690849304
    whole = (((bits >> 23) & 0x1FF) - 126).to(tl.float32)
    n = tl.where(small, whole - 1.0, whole)
    f = tl.where(small, mantissa + mantissa, mantissa) - 1.0
    z = f * f
    p = f * 7.0376836292e-2 + -1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f + -1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f + -1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f + -2.4999993993e-1
    p = p * f + 3.3333331174e-1
    rest = ((p * f) * z + n * -0.00021219444170128554) - 0.5 * z
    return tl.where(x - x == 0.0, (f + rest) + n * 0.693359375, x)


@triton.jit
def logistic(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return e^-x and 1 + e^-x, the denominator of the logistic function."""
    e = tl.where(-x > 87.25, float("inf"), exp_nonpositive(-x))
    return e, e + 1.0


@triton.jit
def sigmoid(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return s = 1 / (1 + e^-x) and 1 - s; the latter is a difference only where that loses no digits."""
    e, total = logistic(x)
    s = tl.div_rn(1.0, total)
    return s, tl.where(x >= 0.0, e * s, 1.0 - s)


@triton.jit
def sigmoid_and_slope(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the logistic function s of x, and the derivative of x · s."""
    s, rest = sigmoid(x)
    return s, s * (x * rest + 1.0)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent of fp32 x; it has the sign of x, also at 0, and a NaN stays NaN."""
    size = tl.abs(x)
    e = exp_nonpositive(size * -2.0)
    far = 1.0 - tl.div_rn(e + e, e + 1.0)
    square = size * size
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square + -5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square + -3.33332819422e-1
    chosen = tl.where(size < 0.625, (p * square) * size + size, far)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    return (chosen.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def soft_cap(x: tl.tensor, cap: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return cap · tanh(x / cap) and its derivative, 1 − tanh²."""
    bent = tanh(tl.div_rn(x, cap))
    return bent * cap, 1.0 - bent * bent


@triton.jit
def normal_share(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the standard normal distribution function and its density at x."""
    a = tl.abs(x)
    a = tl.where(a > 16.0, 16.0, a)
    e = exp_nonpositive(a * a * -0.5)
    t = tl.div_rn(1.0, a + 4.0)
    u = a * t
    p = u * -0.06353152543306351 + 0.33570754528045654
    p = p * u + -0.5696386098861694
    p = p * u + 0.08557075262069702
    p = p * u + 0.6433367729187012
    p = p * u + 0.3108520209789276
    p = p * u + -3.1941747665405273
    p = p * u + 5.233959674835205
    p = p * u + -4.3830790519714355
    beyond = e * (t * (u * p + 2.0))
    return tl.where(x >= 0.0, 1.0 - beyond, beyond), e * 0.3989422917366028


@triton.jit
def round_once(total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round the result of arithmetic to a dtype; every NaN becomes the one NaN of isobit's results.

    Which NaN arithmetic returns depends on the machine, so the test is one of fp32 values, before the rounding.
    """
    rounded = total.to(dtype)
    if dtype == tl.float32:
        one_nan = tl.full(rounded.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        one_nan = tl.full(rounded.shape, 0x7FC0, tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        tl.static_assert(dtype == tl.float16)
        one_nan = tl.full(rounded.shape, 0x7E00, tl.int16).to(tl.float16, bitcast=True)
    return tl.where(total != total, one_nan, rounded)
