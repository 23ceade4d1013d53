"""dW = gradᵀ · x, summed over the tokens of the samples of a batch.

Tokens of a sample are cut into leaves of 256, each one run of products from zero, folded left. Samples of one segment
are folded left too, and segments are merged by a binary counter. See isobit/order/samples.py.
grad is [tokens, N] and x [tokens, K], both contiguous; dw is [N, K]. spans is int64 [samples, 2]: the first token and
the number of tokens of each sample. The grid is one-dimensional over tiles of dw, columns fastest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.compiled.kernels.sums import LEAF
from isobit.compiled.kernels.tiles import (
    count_tile,
    counter_of_program,
    store_tile,
    tile_of_program,
)


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
        total = tl.dot(a, b, total, input_precision="ieee")
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
            total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def weight_grad(
    grad: tl.tensor,
    x: tl.tensor,
    spans: tl.tensor,
    dw: tl.tensor,
    scratch: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SAMPLES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Compute a tile of dw; scratch is fp32 [programs, LEVELS, BLOCK_N, BLOCK_K] with LEVELS = log2(SEGMENTS)."""
    SIZE: tl.constexpr = SAMPLES // SEGMENTS
    rows, columns = tile_of_program(K, BLOCK_N, BLOCK_K)
    counter = counter_of_program(scratch, LEVELS, BLOCK_N, BLOCK_K)
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
        total = count_tile(counter, total, segment, LEVELS, BLOCK_N, BLOCK_K)
    store_tile(dw, total, rows, columns, N, K)
