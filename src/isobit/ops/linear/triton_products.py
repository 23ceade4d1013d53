"""y = x · weightᵀ + bias: K is cut into SEGMENTS equal segments, merged by the balanced tree.

Three kernels with one order. `linear_tile` keeps partial sums in registers. `linear_counter` keeps those of the upper
levels in memory. `linear_segments` and `merge_segments` compute one segment per program, for few rows.
x is [M, K], y [M, N] and weight [N, K], or [K, N] if TRANSPOSED, all contiguous. The weight has fewer than 2^31
elements. The grid is one-dimensional over tiles; program 0 computes the tile `first_tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.ordered_rows import merge_lanes
from isobit.ops.gpu.sums import LEAF, add_dot, add_products, merge_columns

GROUP = tl.constexpr(
    8
)  # tiles of rows whose programs run side by side, so that they share columns in the cache


@triton.jit
def find_tile(
    tile: tl.tensor, m: tl.tensor, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row (int64) and the first column of a tile."""
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group, inside = tile // (GROUP * across), tile % (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    row = (group * GROUP + inside % height).to(tl.int64) * BLOCK_M
    return row, (inside // height) * BLOCK_N


@triton.jit
def sum_segment(
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    segment: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, BLOCK_N], the sum of one segment of the products of a tile.

    It is one run on a tensor core, and leaves of 256, folded left, in fp32.
    """
    LENGTH: tl.constexpr = K // SEGMENTS
    STEP: tl.constexpr = N if TRANSPOSED else 1
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    left = x + (row * K + segment * LENGTH) + rows * K
    if TRANSPOSED:
        right = weight + (column + segment * (LENGTH * N)) + columns
    else:
        right = weight + (column.to(tl.int64) * K + segment * LENGTH) + columns * K
    left_in, right_in = row + rows < m, column + columns < N
    zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    FIRST: tl.constexpr = LENGTH if x.dtype.element_ty != tl.float32 else min(LENGTH, LEAF)
    total = add_products(zeros, left, right, left_in, right_in, FIRST, 1, STEP, BLOCK_K)
    WHOLE: tl.constexpr = FIRST + (LENGTH - FIRST) // LEAF * LEAF
    for at in range(FIRST, WHOLE, LEAF):
        total = total + add_products(
            zeros, left + at, right + at * STEP, left_in, right_in, LEAF, 1, STEP, BLOCK_K
        )
    if WHOLE < LENGTH:
        REST: tl.constexpr = LENGTH - WHOLE
        total = total + add_products(
            zeros, left + WHOLE, right + WHOLE * STEP, left_in, right_in, REST, 1, STEP, BLOCK_K
        )
    return total


@triton.jit
def store_tile(
    total: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Add the bias to a tile, round and store it."""
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    if HAS_BIAS:
        known = column + columns < N
        total = total + tl.load(bias + column + columns, mask=known, other=0.0).to(tl.float32)
    inside = (row + rows < m) & (column + columns < N)
    place = y + (row * N + column) + (rows * N + columns)
    tl.store(place, round_once(total, y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "first_tile"])
def linear_tile(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    first_tile: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of y with all partial sums in registers; at most 8 segments."""
    tl.static_assert(SEGMENTS <= 8)
    row, column = find_tile(first_tile + tl.program_id(0), m, N, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    one, two, four = total, total, total  # finished sums of 1, 2 and 4 segments
    for segment in tl.static_range(SEGMENTS):
        total = sum_segment(
            x, weight, row, column, segment, m, N, K, SEGMENTS, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
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
    store_tile(total, bias, y, row, column, m, N, HAS_BIAS, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["m", "first_tile"])
def linear_counter(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    scratch: tl.tensor,
    m: tl.tensor,
    first_tile: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PAIRS: tl.constexpr,
    LEVELS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of y with a binary counter: sums of 1 or 2 PAIRS are in registers, larger ones in `scratch`.

    scratch is fp32 [programs, LEVELS, BLOCK_M, BLOCK_N], with LEVELS = log2(SEGMENTS / (2 * PAIRS)). There are at
    least 2 * PAIRS segments. Pairs are a loop, because ptxas spills registers if it is unrolled.
    See [Note: binary counter] in isobit/order/tree.py.
    """
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    tl.static_assert(PAIRS <= 2 and SEGMENTS >= 2 * PAIRS)
    row, column = find_tile(first_tile + tl.program_id(0), m, N, BLOCK_M, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for run in range(SEGMENTS // (2 * PAIRS)):
        first = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # the sum of the first pair
        for pair in range(PAIRS):
            at = 2 * (PAIRS * run + pair)
            left = sum_segment(
                x, weight, row, column, at, m, N, K, SEGMENTS, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
            )
            right = sum_segment(
                x, weight, row, column, at + 1, m, N, K, SEGMENTS, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
            )  # fmt: skip
            total = left + right
            if pair == 0:
                first = total
            else:
                total = first + total
        own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        own = scratch + tl.program_id(0).to(tl.int64) * (LEVELS * TILE) + own
        for level in tl.static_range(LEVELS):
            if (run & ((1 << level) - 1)) == (1 << level) - 1:  # all lower digits carried
                if (run >> level) & 1:
                    tl.debug_barrier()  # other warps may have stored what this one loads
                    total = tl.load(own + level * TILE) + total
                else:
                    tl.store(own + level * TILE, total)
    store_tile(total, bias, y, row, column, m, N, HAS_BIAS, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["m"])
def linear_segments(
    x: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute a tile of one segment, program_id(1); partial is fp32 [SEGMENTS, m, N]."""
    segment = tl.program_id(1)
    row, column = find_tile(tl.program_id(0), m, N, BLOCK_M, BLOCK_N)
    total = sum_segment(
        x, weight, row, column, segment, m, N, K, SEGMENTS, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K
    )
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    inside = (row + rows < m) & (column + columns < N)
    place = partial + ((segment * m + row) * N + column) + (rows * N + columns)
    tl.store(place, total, mask=inside)


@triton.jit(do_not_specialize=["m"])
def merge_segments(
    partial: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Merge partial [SEGMENTS, m, N] into y [m, N] by the balanced tree."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside, size = at < m.to(tl.int64) * N, m.to(tl.int64) * N
    place = tl.arange(0, SEGMENTS)[None, :] * size + at
    total = merge_columns(tl.load(partial + place, mask=inside, other=0.0), BLOCK, SEGMENTS)
    if HAS_BIAS:
        total = total + tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, round_once(total, y.dtype.element_ty), mask=inside)


# dW = gradᵀ · x and db, summed over the tokens of the samples of a batch.
#
# Tokens of a sample are cut into leaves of 256, each one run of products from zero, folded left. Samples of one
# segment are folded left too, and segments are merged by a binary counter. See isobit/order/samples.py. grad is
# [tokens, N] and x [tokens, K], both contiguous; dw is [N, K]. spans is int64 [samples, 2]: the first token and the
# number of tokens of each sample. The grid is one-dimensional over tiles of dw, columns fastest; program 0 computes
# the tile `first_tile`. How many samples there are is known at run time: a kernel serves every batch.


@triton.jit
def sum_tokens(
    grad: tl.tensor,
    x: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_N, BLOCK_K], the sum over `count` tokens from `first` on; see `add_products` for the tail."""
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    left, right = grad + first * N + rows[:, None], x + first * K + columns[None, :]
    left_in, right_in = rows[:, None] < N, columns[None, :] < K
    token = tl.arange(0, BLOCK_T)
    whole = count // BLOCK_T * BLOCK_T
    for at in range(0, whole, BLOCK_T):
        a = tl.load(left + (at + token)[None, :] * N, mask=left_in, other=0.0)  # [BLOCK_N, BLOCK_T]
        b = tl.load(
            right + (at + token)[:, None] * K, mask=right_in, other=0.0
        )  # [BLOCK_T, BLOCK_K]
        total = add_dot(a, b, total)
    if grad.dtype.element_ty == tl.float32:
        for at in range(whole, count):
            a = tl.load(left + at * N, mask=left_in, other=0.0)  # [BLOCK_N, 1]
            b = tl.load(right + at * K, mask=right_in, other=0.0)  # [1, BLOCK_K]
            a, b = tl.broadcast(a, b)
            total = tl.math.fma(a, b, total)
    else:
        step = tl.arange(0, 16)
        for at in range(whole, count, 16):
            inside = at + step < count
            a = tl.load(left + (at + step)[None, :] * N, mask=left_in & inside[None, :], other=0.0)
            b = tl.load(
                right + (at + step)[:, None] * K, mask=right_in & inside[:, None], other=0.0
            )
            total = add_dot(a, b, total)
    return total


@triton.jit(do_not_specialize=["first_tile", "segments", "size", "levels"])
def weight_grad(
    grad: tl.tensor,
    x: tl.tensor,
    spans: tl.tensor,
    dw: tl.tensor,
    scratch: tl.tensor,
    first_tile: tl.tensor,
    segments: tl.tensor,
    size: tl.tensor,
    levels: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Compute a tile of dw over `segments` segments of `size` samples, at least one each.

    If SPLIT, program_id(1) is a part of that many segments, and dw fp32 [parts, N, K] has their sums, not rounded.
    scratch is fp32 [parts, programs, levels, BLOCK_N, BLOCK_K] with levels = log2(segments).
    """
    TILE: tl.constexpr = BLOCK_N * BLOCK_K
    tile, across = first_tile + tl.program_id(0), tl.cdiv(K, BLOCK_K)
    program = tl.program_id(0).to(tl.int64)
    if SPLIT:
        part = tl.program_id(1)
        program += part.to(tl.int64) * tl.num_programs(0)
        spans += 2 * part * segments * size
        dw += part.to(tl.int64) * (N * K)
    rows = (tile // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tile % across) * BLOCK_K + tl.arange(0, BLOCK_K)
    own = tl.arange(0, BLOCK_N)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    own = scratch + program * levels * TILE + own
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for segment in range(segments):
        for sample in range(segment * size, (segment + 1) * size):
            first, count = tl.load(spans + 2 * sample), tl.load(spans + 2 * sample + 1).to(tl.int32)
            start = tl.minimum(count, LEAF)
            run = sum_tokens(grad, x, first, start, rows, columns, N, K, BLOCK_N, BLOCK_K, BLOCK_T)
            if sample == segment * size:  # noqa: SIM108 (a ternary of tensors would compute both)
                total = run
            else:
                total = total + run
            for at in range(start, count, LEAF):
                length = tl.minimum(count - at, LEAF)
                total = total + sum_tokens(
                    grad, x, first + at, length, rows, columns, N, K, BLOCK_N, BLOCK_K, BLOCK_T
                )
        level = 0
        while (segment >> level) % 2 == 1:  # the digits that carry
            tl.debug_barrier()  # other warps may have stored what this one loads
            total = tl.load(own + level * TILE) + total
            level += 1
        if level < levels:
            tl.store(own + level * TILE, total)
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    place = rows[:, None].to(tl.int64) * K + columns[None, :]
    if not SPLIT:
        total = round_once(total, dw.dtype.element_ty)
    tl.store(dw + place, total, mask=inside)


@triton.jit(do_not_specialize=["parts"])
def merge_parts(
    sums: tl.tensor, dw: tl.tensor, parts: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store dw [SIZE], the balanced tree over sums fp32 [parts, SIZE], which are overwritten; a power of two parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    apart = 1
    while apart < parts:
        for first in range(0, parts, 2 * apart):
            place = sums + first * SIZE + at
            total = tl.load(place, mask=inside) + tl.load(place + apart * SIZE, mask=inside)
            tl.store(place, total, mask=inside)
        tl.debug_barrier()  # other warps may have stored what this one loads
        apart *= 2
    total = tl.load(sums + at, mask=inside)
    tl.store(dw + at, round_once(total, dw.dtype.element_ty), mask=inside)


@triton.jit
def sum_leaf_rows(
    grad: tl.tensor,
    leaves: tl.tensor,
    sums: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sums of grad over the tokens of a leaf, sums fp32 [leaves, N]; leaves is int64 [leaves, 2]."""
    leaf = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, length = tl.load(leaves + leaf * 2), tl.load(leaves + leaf * 2 + 1)
    lane = tl.arange(0, 16)[:, None]
    total = tl.zeros((16, BLOCK), tl.float32)
    for at in range(0, length, 16):
        known = at + lane < length
        place = (start + at + lane) * N + column
        value = tl.load(grad + place, mask=known & (column < N), other=0.0).to(tl.float32)
        total = tl.where(known, total + value, total)
    place = leaf.to(tl.int64) * N + tl.trans(column)  # [BLOCK, 1]
    tl.store(sums + place, merge_lanes(total, BLOCK), mask=tl.trans(column) < N)
