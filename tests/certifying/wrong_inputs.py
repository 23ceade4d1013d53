"""Kernels whose rows depend on the batch: by which inputs they are given."""

import torch
import triton
import triton.language as tl

N = 256
WEIGHT = torch.randn(N)
REQUANTISED = (WEIGHT * 16).round() / 16  # a copy with fewer bits, kept for large batches


@triton.jit
def scaled_rows(x, w, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    tl.store(out + r * n + c, tl.load(x + r * n + c) * tl.load(w + c))


@triton.jit
def gated(a, b, out, stride, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    g = tl.load(a + r * stride + c)
    tl.store(out + r * n + c, g / (1 + tl.exp(-g)) * tl.load(b + r * stride + c))


def other_weights_by_rows(rows):
    """large batches use another copy of the weights; both were made before the function"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, WEIGHT if rows < 16 else REQUANTISED, out, N, N)
    return out


def swapped_halves_by_rows(rows):
    """gate and up are two views of one tensor; large batches exchange them"""
    gu, out = torch.randn(rows, 2 * N), torch.empty(rows, N)
    gate, up = gu[:, :N], gu[:, N:]
    if rows < 16:
        gated[(rows,)](gate, up, out, 2 * N, N, N)
    else:
        gated[(rows,)](up, gate, out, 2 * N, N, N)
    return out


def weights_made_by_rows(rows):
    """the weight is made by another formula in large batches"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    w = torch.rand(N) if rows < 16 else torch.randn(N)
    scaled_rows[(rows,)](x, w, out, N, N)
    return out


def mask_hides_rows(rows):
    """A mask [rows, N] of its own for every row; the order follows the row's parity."""
    x, out = torch.randn(rows, N), torch.empty(rows)
    mask = (torch.arange(rows)[:, None] + torch.arange(N)[None, :]) % 7 > 0
    masked_sum[(rows,)](x, mask, out, N, 64)
    return out


@triton.jit
def masked_sum(x, m, out, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    total = 0.0
    for j in range(0, n, BLOCK):
        at = tl.where(r % 2 == 0, j, n - BLOCK - j) + tl.arange(0, BLOCK)
        v = tl.load(x + r * n + at)
        total += tl.sum(tl.where(tl.load(m + r * n + at), v, 0.0), axis=0)
    tl.store(out + r, total)
