"""Sums whose order is written out: balanced trees, the runs of a product, and striped rows."""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import exp_nonpositive

LEAF = tl.constexpr(256)  # of isobit.order.plan


@triton.jit
def halve(x: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """Add neighbours: x [ROWS, N] becomes [ROWS, N / 2]."""
    left, right = tl.split(tl.reshape(x, (ROWS, N // 2, 2)))
    return left + right


@triton.jit
def merge_columns(x: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """Return [ROWS, 1], the balanced tree over the columns of x [ROWS, N]; N is a power of two up to 128."""
    tl.static_assert(N <= 128)
    if N >= 128:
        x = halve(x, ROWS, 128)
    if N >= 64:
        x = halve(x, ROWS, 64)
    if N >= 32:
        x = halve(x, ROWS, 32)
    if N >= 16:
        x = halve(x, ROWS, 16)
    if N >= 8:
        x = halve(x, ROWS, 8)
    if N >= 4:
        x = halve(x, ROWS, 4)
    if N >= 2:
        x = halve(x, ROWS, 2)
    return x


@triton.jit
def halve_pairs(
    most: tl.tensor, total: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Merge neighbouring pairs (maximum, sum of exp(x − maximum)), both [ROWS, N]: rescale to the larger maximum."""
    left, right = tl.split(tl.reshape(most, (ROWS, N // 2, 2)))
    left_total, right_total = tl.split(tl.reshape(total, (ROWS, N // 2, 2)))
    new = tl.maximum(left, right)
    base = tl.where(new == -float("inf"), 0.0, new)
    left_total = left_total * exp_nonpositive(left - base)
    return new, left_total + right_total * exp_nonpositive(right - base)


@triton.jit
def merge_pairs(
    most: tl.tensor, total: tl.tensor, ROWS: tl.constexpr, N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the pairs [ROWS, 1], the balanced tree over N pairs; N is a power of two up to 8."""
    tl.static_assert(N <= 8)
    if N >= 8:
        most, total = halve_pairs(most, total, ROWS, 8)
    if N >= 4:
        most, total = halve_pairs(most, total, ROWS, 4)
    if N >= 2:
        most, total = halve_pairs(most, total, ROWS, 2)
    return most, total


@triton.jit
def fresh_dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a @ b from an accumulator of zeros, also where the result is added to another tile.

    Triton rewrites `x + tl.dot(a, b)` into `tl.dot(a, b, x)` unless `max_num_imprecise_acc` is set, which has no
    other effect on 16-bit and fp32 operands.
    """
    return tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)


@triton.jit
def add_dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return total + a @ b; a total that is known to be zero is not replaced by what the result is added to."""
    return tl.dot(a, b, total, input_precision="ieee", max_num_imprecise_acc=1)


@triton.jit
def add_products(
    total: tl.tensor,
    left: tl.tensor,
    right: tl.tensor,
    left_in: tl.tensor,
    right_in: tl.tensor,
    LENGTH: tl.constexpr,
    LEFT_STEP: tl.constexpr,
    RIGHT_STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Add one run of LENGTH products to total [BLOCK_M, BLOCK_N], ascending.

    left [BLOCK_M, 1] and right [1, BLOCK_N] point to the first factors of rows and columns, and LEFT_STEP, RIGHT_STEP
    are the distances to the next ones. A tail of 16-bit factors is padded with products of +0 and +0 to a multiple of
    16, the length of one tensor-core instruction; a tail of fp32 factors is added one fused multiply-add at a time.
    """
    WHOLE: tl.constexpr = LENGTH // BLOCK_K * BLOCK_K
    k = tl.arange(0, BLOCK_K)
    for at in range(0, WHOLE, BLOCK_K):
        a = tl.load(
            left + (at + k)[None, :] * LEFT_STEP, mask=left_in, other=0.0
        )  # [BLOCK_M, BLOCK_K]
        b = tl.load(
            right + (at + k)[:, None] * RIGHT_STEP, mask=right_in, other=0.0
        )  # [BLOCK_K, BLOCK_N]
        total = add_dot(a, b, total)
    if WHOLE < LENGTH:
        if left.dtype.element_ty == tl.float32:
            for at in range(WHOLE, LENGTH):
                a = tl.load(left + at * LEFT_STEP, mask=left_in, other=0.0)  # [BLOCK_M, 1]
                b = tl.load(right + at * RIGHT_STEP, mask=right_in, other=0.0)  # [1, BLOCK_N]
                a, b = tl.broadcast(a, b)
                total = tl.math.fma(a, b, total)
        else:
            step = tl.arange(0, 16)
            for at in range(WHOLE, LENGTH, 16):
                inside = at + step < LENGTH
                a = tl.load(
                    left + (at + step)[None, :] * LEFT_STEP,
                    mask=left_in & inside[None, :],
                    other=0.0,
                )
                b = tl.load(
                    right + (at + step)[:, None] * RIGHT_STEP,
                    mask=right_in & inside[:, None],
                    other=0.0,
                )
                total = add_dot(a, b, total)
    return total
