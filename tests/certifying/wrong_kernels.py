"""Kernels whose order is wrong, or depends on the launch: what the comparison with a plan must catch."""

import triton
import triton.language as tl


@triton.jit
def row_sum(x, y, N: tl.constexpr):
    """tl.sum: its order depends on the number of warps."""
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N))))


@triton.jit
def branch_on_data(x, y, N: tl.constexpr):
    """A sum that is skipped where the first element is negative."""
    first = tl.load(x)
    if first > 0.0:
        at = tl.arange(0, N)
        tl.store(y + at, tl.load(x + at) * 2.0)


@triton.jit
def added_dot(x, weight, bias, y, m, first_tile, N: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr,
              TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Two segments of one step each, added: Triton starts the second product from the first sum."""
    row, column, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    left, right = x + row[:, None] * K + k[None, :], weight + column[None, :] * K + k[:, None]
    inside, beside = row[:, None] < m, column[None, :] < N
    total = tl.dot(tl.load(left, mask=inside, other=0.0), tl.load(right, mask=beside, other=0.0))
    a = tl.load(left + BLOCK_K, mask=inside, other=0.0)
    b = tl.load(right + BLOCK_K, mask=beside, other=0.0)
    total = total + tl.dot(a, b)
    tl.store(y + row[:, None] * N + column[None, :], total, mask=inside & beside)
