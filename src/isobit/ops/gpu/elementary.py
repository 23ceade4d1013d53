"""exp, log and the one NaN, operation by operation as csrc/exponential.h and csrc/logarithm.h have them.

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
