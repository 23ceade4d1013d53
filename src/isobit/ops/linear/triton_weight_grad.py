"""dW = gradᵀ · x and db, summed over the tokens of the samples of a batch.

Tokens of a sample are cut into leaves of 256, each one run of products from zero, folded left. Samples of one segment
are folded left too, and segments are merged by a binary counter. See isobit/order/samples.py.
grad is [tokens, N] and x [tokens, K], both contiguous; dw is [N, K]. spans is int64 [samples, 2]: the first token and
the number of tokens of each sample. The grid is one-dimensional over tiles of dw, columns fastest; program 0 computes
the tile FIRST. How many samples there are is known at run time: a kernel serves every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.ordered_rows import merge_lanes
from isobit.ops.gpu.sums import LEAF, add_dot


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
            a = tl.load(left + at * N, mask=left_in, other=0.0)
            b = tl.load(right + at * K, mask=right_in, other=0.0)
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


@triton.jit(do_not_specialize=["FIRST", "SEGMENTS", "SIZE", "LEVELS"])
def weight_grad(
    grad: tl.tensor,
    x: tl.tensor,
    spans: tl.tensor,
    dw: tl.tensor,
    scratch: tl.tensor,
    FIRST: tl.tensor,
    SEGMENTS: tl.tensor,
    SIZE: tl.tensor,
    LEVELS: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Compute a tile of dw over SEGMENTS segments of SIZE samples, at least one each.

    scratch is fp32 [programs, LEVELS, BLOCK_N, BLOCK_K] with LEVELS = log2(SEGMENTS).
    """
    TILE: tl.constexpr = BLOCK_N * BLOCK_K
    tile, across = FIRST + tl.program_id(0), tl.cdiv(K, BLOCK_K)
    rows = (tile // across) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = (tile % across) * BLOCK_K + tl.arange(0, BLOCK_K)
    own = tl.arange(0, BLOCK_N)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    own = scratch + tl.program_id(0).to(tl.int64) * LEVELS * TILE + own
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for segment in range(SEGMENTS):
        for sample in range(segment * SIZE, (segment + 1) * SIZE):
            first, count = tl.load(spans + 2 * sample), tl.load(spans + 2 * sample + 1).to(tl.int32)
            start = tl.minimum(count, LEAF)
            run = sum_tokens(grad, x, first, start, rows, columns, N, K, BLOCK_N, BLOCK_K, BLOCK_T)
            if sample == segment * SIZE:  # noqa: SIM108 (a ternary of tensors would compute both)
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
            total = tl.load(own + level * TILE) + total
            level += 1
        if level < LEVELS:
            tl.store(own + level * TILE, total)
    inside = (rows[:, None] < N) & (columns[None, :] < K)
    place = rows[:, None].to(tl.int64) * K + columns[None, :]
    tl.store(dw + place, round_once(total, dw.dtype.element_ty), mask=inside)


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
