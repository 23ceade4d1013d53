"""A matrix product in Triton, five ways: does a row depend on how many rows there are?

Try, from the root of the repository:

    isobit certify examples/certify/matmul.py:matmul --rows 1,3,70,130 --vary BLOCK_M=16,64,128
    isobit certify examples/certify/matmul.py:autotuned --rows 1,3,70,130
    isobit certify examples/certify/matmul.py:split_k_by_rows --rows 1,3,70,130
    isobit certify examples/certify/matmul.py:split_k_by_features --rows 1,3,70,130 --vary BLOCK_M=16,64
    isobit certify examples/certify/matmul.py:matmul_atomic --rows 1,3,70,130
"""

import torch
import triton
import triton.language as tl

N, K = 64, 256  # features of the weight: small, so that a certificate takes seconds


@triton.jit
def matmul_kernel(
    x,  # [M, K]
    w,  # [K, N]
    out,  # [M, N]
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + inner
        a = tl.load(x + rows[:, None] * K + k[None, :], mask=rows[:, None] < M, other=0.0)
        b = tl.load(w + k[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    where = out + rows[:, None] * N + columns[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=rows[:, None] < M)


@triton.jit
def split_k_kernel(
    x,  # [M, K]
    w,  # [K, N]
    partials,  # [splits, M, N] in fp32
    M,
    N,
    K,
    PART: tl.constexpr,  # terms of one split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, PART, BLOCK_K):
        k = split * PART + start + inner
        a = tl.load(x + rows[:, None] * K + k[None, :], mask=rows[:, None] < M, other=0.0)
        b = tl.load(w + k[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    where = partials + split * M * N + rows[:, None] * N + columns[None, :]
    tl.store(where, acc, mask=rows[:, None] < M)


@triton.jit
def merge_kernel(partials, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(partials + at, mask=at < size)
    for split in range(1, SPLITS):
        total += tl.load(partials + split * size + at, mask=at < size)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def split_k_atomic_kernel(
    x,  # [M, K]
    w,  # [K, N]
    out,  # [M, N] in fp32, zeros before the launch
    M,
    N,
    K,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, PART, BLOCK_K):
        k = split * PART + start + inner
        a = tl.load(x + rows[:, None] * K + k[None, :], mask=rows[:, None] < M, other=0.0)
        b = tl.load(w + k[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc)
    where = out + rows[:, None] * N + columns[None, :]
    tl.atomic_add(where, acc, mask=rows[:, None] < M)


# The autotuner picks by time, again for every new M. Every configuration is judged.
autotuned_kernel = triton.autotune(
    configs=[
        triton.Config({"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4, num_stages=2),
        triton.Config({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32}, num_warps=8, num_stages=3),
    ],
    key=["M", "N", "K"],
)(matmul_kernel)


def multiply(x, w, block_m=64, block_k=32, num_warps=4):
    """Return x @ w: one accumulator per output, which runs through all of K."""
    (m, k), n = x.shape, w.shape[1]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, 64))
    matmul_kernel[grid](x, w, out, m, n, k, block_m, 64, block_k, num_warps=num_warps)
    return out


def multiply_split(x, w, splits, block_m=16, block_k=32):
    """Return x @ w with K in equal parts, which fills the GPU when there are few rows."""
    (m, k), n = x.shape, w.shape[1]
    if splits == 1:
        return multiply(x, w, block_m, block_k)
    partials = torch.empty((splits, m, n), dtype=torch.float32, device=x.device)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, 64), splits)
    split_k_kernel[grid](x, w, partials, m, n, k, k // splits, block_m, 64, block_k)
    merge_kernel[(triton.cdiv(m * n, 256),)](partials, out, m * n, splits, 256)
    return out


def multiply_atomic(x, w, splits=4, block_m=16, block_k=32):
    """Return x @ w with K in parts that are added in whichever order they finish."""
    (m, k), n = x.shape, w.shape[1]
    out = torch.zeros((m, n), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(m, block_m), triton.cdiv(n, 64), splits)
    split_k_atomic_kernel[grid](x, w, out, m, n, k, k // splits, block_m, 64, block_k)
    return out


def operands(rows):
    """Return inputs of the shapes to certify. Their values do not matter: every float is a symbol."""
    return torch.randn(rows, K).to(torch.bfloat16), torch.randn(K, N).to(torch.bfloat16)


# What `isobit certify` calls, once per configuration.


def matmul(rows, BLOCK_M=64, BLOCK_K=32, num_warps=4):
    """Certify one accumulator per output: the tile may be chosen freely."""
    return multiply(*operands(rows), BLOCK_M, BLOCK_K, num_warps)


def autotuned(rows):
    """Certify what the autotuner may pick: tiles of all shapes, and other stages."""
    x, w = operands(rows)
    out = torch.empty((rows, N), dtype=x.dtype)
    autotuned_kernel[
        lambda meta: (triton.cdiv(rows, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"]))
    ](x, w, out, rows, N, K)
    return out


def split_k_by_rows(rows):
    """Certify split-K as a heuristic picks it: more splits for fewer rows."""
    return multiply_split(*operands(rows), splits=4 if rows <= 16 else 2 if rows <= 64 else 1)


def split_k_by_features(rows, BLOCK_M=16):
    """Certify split-K with as many splits as K asks for, whatever the number of rows."""
    return multiply_split(*operands(rows), splits=K // 64, block_m=BLOCK_M)


def matmul_atomic(rows):
    """Certify split-K that merges by atomic additions."""
    return multiply_atomic(*operands(rows))
