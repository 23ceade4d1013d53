"""y = x · weightᵀ: K is cut into SEGMENTS equal segments, merged by the balanced tree.

Three kernels with one order. `linear_tile` keeps partial sums in registers. `linear_counter` keeps those of the upper
levels in memory. `linear_segments` and `merge_segments` compute one segment per program, for few rows.
x is [M, K], weight [N, K] and y [M, N], all contiguous. The grid is one-dimensional over tiles, columns fastest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.compiled.kernels.elementary import round_once
from isobit.compiled.kernels.sums import LEAF, add_products, merge_columns
from isobit.compiled.kernels.tiles import (
    count_tile,
    counter_of_program,
    store_tile,
    tile_of_program,
)


@triton.jit
def sum_segment(
    x: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    segment: tl.tensor,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, BLOCK_N], the sum of one segment of LENGTH products.

    It is one run on a tensor core, and leaves of 256, folded left, in fp32.
    """
    left = x + rows[:, None] * K + segment * LENGTH
    right = weight + columns[None, :] * K + segment * LENGTH
    left_in, right_in = rows[:, None] < M, columns[None, :] < N
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    FIRST: tl.constexpr = LENGTH if x.dtype.element_ty != tl.float32 else min(LENGTH, LEAF)
    total = add_products(zeros, left, right, left_in, right_in, FIRST, 1, 1, BLOCK_K)
    WHOLE: tl.constexpr = FIRST + (LENGTH - FIRST) // LEAF * LEAF
    for at in range(FIRST, WHOLE, LEAF):
        total = total + add_products(
            zeros, left + at, right + at, left_in, right_in, LEAF, 1, 1, BLOCK_K
        )
    if WHOLE < LENGTH:
        total = total + add_products(
            zeros, left + WHOLE, right + WHOLE, left_in, right_in, LENGTH - WHOLE, 1, 1, BLOCK_K
        )
    return total


@triton.jit
def linear_tile(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of y with all partial sums in registers; at most 8 segments."""
    tl.static_assert(SEGMENTS <= 8)
    LENGTH: tl.constexpr = K // SEGMENTS
    rows, columns = tile_of_program(N, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    one, two, four = total, total, total  # finished sums of 1, 2 and 4 segments
    for segment in tl.static_range(SEGMENTS):
        total = sum_segment(
            x, weight, rows, columns, M, N, segment, K, LENGTH, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if segment % 2 == 0:
            one = total
        else:
            total = one + total
            if segment % 4 == 1:
                two = total
            else:
                total = two + total
                if segment % 8 == 3:
                    four = total
                else:
                    total = four + total
    store_tile(y, total, rows, columns, M, N)


@triton.jit
def linear_counter(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    scratch: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of y with a binary counter: the sum of a pair is in registers, larger ones in `scratch`.

    scratch is fp32 [programs, LEVELS, BLOCK_M, BLOCK_N], with LEVELS = log2(SEGMENTS) - 1 and SEGMENTS at least 2.
    """
    LENGTH: tl.constexpr = K // SEGMENTS
    rows, columns = tile_of_program(N, BLOCK_M, BLOCK_N)
    counter = counter_of_program(scratch, LEVELS, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for pair in range(SEGMENTS // 2):
        left = sum_segment(
            x, weight, rows, columns, M, N, 2 * pair, K, LENGTH, BLOCK_M, BLOCK_N, BLOCK_K
        )
        right = sum_segment(
            x, weight, rows, columns, M, N, 2 * pair + 1, K, LENGTH, BLOCK_M, BLOCK_N, BLOCK_K
        )
        total = count_tile(counter, left + right, pair, LEVELS, BLOCK_M, BLOCK_N)
    store_tile(y, total, rows, columns, M, N)


@triton.jit
def linear_segments(
    x: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of one segment, program_id(1); partial is fp32 [SEGMENTS, M, N]."""
    LENGTH: tl.constexpr = K // SEGMENTS
    rows, columns = tile_of_program(N, BLOCK_M, BLOCK_N)
    segment = tl.program_id(1)
    total = sum_segment(
        x, weight, rows, columns, M, N, segment, K, LENGTH, BLOCK_M, BLOCK_N, BLOCK_K
    )
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    place = (segment * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(partial + place, total, mask=inside)


@triton.jit
def merge_segments(
    partial: tl.tensor, y: tl.tensor, SIZE: tl.tensor, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Merge partial [SEGMENTS, SIZE] into y [SIZE] by the balanced tree."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.arange(0, SEGMENTS)
    inside = at[:, None] < SIZE
    place = segment[None, :].to(tl.int64) * SIZE + at[:, None]
    total = merge_columns(tl.load(partial + place, mask=inside, other=0.0), BLOCK, SEGMENTS)
    tl.store(y + at[:, None], round_once(total, y.dtype.element_ty), mask=inside)
