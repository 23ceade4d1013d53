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

    A NaN that arithmetic returns is 0x7fffffff, or 0x7fff in 16 bits, which is the largest signed integer. So one
    integer minimum replaces it, and no predicate is carried from layout to layout.
    """
    rounded = total.to(dtype)
    if dtype == tl.float32:
        bits = tl.minimum(rounded.to(tl.int32, bitcast=True), 0x7FC00000)
    elif dtype == tl.bfloat16:
        bits = tl.minimum(rounded.to(tl.int16, bitcast=True), tl.full((), 0x7FC0, tl.int16))
    else:
        tl.static_assert(dtype == tl.float16)
        bits = tl.minimum(rounded.to(tl.int16, bitcast=True), tl.full((), 0x7E00, tl.int16))
    return bits.to(dtype, bitcast=True)
