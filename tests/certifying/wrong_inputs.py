"""Kernels whose rows depend on the batch: by which inputs they are given."""

import numpy as np
import torch
import triton
import triton.language as tl

N = 256
WEIGHT = torch.randn(N)
SCALE = torch.ones(N)
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


# ---- memory that numpy changes: torch does not see it
def numpy_changes_weight(rows):
    """a weight is scaled through numpy, by another factor in large batches"""
    w, x, out = torch.ones(N), torch.randn(rows, N), torch.empty(rows, N)
    w.numpy()[:] *= 2 if rows < 16 else 3
    scaled_rows[(rows,)](x, w, out, N, N)
    return out


def numpy_changes_outside_weight(rows):
    """the same with a weight that was made before"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    np.asarray(SCALE)[:] = 2 if rows < 16 else 3
    scaled_rows[(rows,)](x, SCALE, out, N, N)
    return out


def numpy_changes_what_is_copied(rows):
    """torch computes the weight from a buffer that numpy filled"""
    host, x, out = torch.empty(N), torch.randn(rows, N), torch.empty(rows, N)
    host.numpy()[:] = 2 if rows < 16 else 3
    scaled_rows[(rows,)](x, host.clone() * 0.5, out, N, N)
    return out


def numpy_changes_what_is_sorted(rows):
    """a copy that moves elements is not followed"""
    host, x, out = torch.empty(N), torch.randn(rows, N), torch.empty(rows, N)
    host.numpy()[:] = 0.5
    scaled_rows[(rows,)](x, host.sort().values, out, N, N)
    return out


def numpy_changes_result(rows):
    """numpy scales what a kernel wrote"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    scaled_rows[(rows,)](x, WEIGHT, out, N, N)
    with np.errstate(all="ignore"):  # nothing is there when launches are only looked at
        out.numpy()[:] *= 2 if rows < 16 else 3
    return out


def numpy_keeps_result(rows):
    """the same by an array that was made before the launch"""
    x, out = torch.randn(rows, N), torch.empty(rows, N)
    array = out.numpy()
    array[:] = 0
    scaled_rows[(rows,)](x, WEIGHT, out, N, N)
    array *= 2 if rows < 16 else 3
    return out


def numpy_changes_between_launches(rows):
    """the second launch has another weight, in the same memory"""
    w, x = torch.ones(N), torch.randn(rows, N)
    between, out = torch.empty(rows, N), torch.empty(rows, N)
    array = w.numpy()
    scaled_rows[(rows,)](x, w, between, N, N)
    array[:] = 2 if rows < 16 else 3
    scaled_rows[(rows,)](between, w, out, N, N)
    return out


# ---- bytes
@triton.jit
def byte_of_neighbour(x, out):
    row = tl.program_id(0)
    bits = tl.load(x + row // 2 * 2).to(tl.uint16) << 8
    tl.store(out + row, bits.to(tl.float16, bitcast=True).to(tl.float32))


def byte_of_other_row(rows):
    """odd rows read the byte of the even row beside them, in the same 16 bits"""
    x, out = torch.randn(rows).to(torch.float8_e5m2).view(torch.uint8), torch.empty(rows)
    byte_of_neighbour[(rows,)](x, out)
    return out


def a_part_is_given(rows):
    """TRUTH: invariant, and not followed. The kernel has half of the memory that is returned."""
    x, out = torch.randn(rows, N), torch.zeros(rows, 2 * N)
    gated[(rows,)](x, x, out.view(-1)[: rows * N], N, N, N)
    return out
