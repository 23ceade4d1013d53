"""Kernels as people write them, which `isobit check` runs without a GPU: right ones, and some with one fault."""

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, out, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    value = tl.load(x + row * n + columns, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / n
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + columns, value / tl.sqrt(mean + eps) * w, mask=mask)


def launch_rms_norm(x, weight, num_warps=4, eps=1e-6):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows,)](x, weight, out, n, eps, BLOCK=block, num_warps=num_warps)
    return out


def rms_norm(x, weight):
    return launch_rms_norm(x, weight)


def rms_norm_by_rows(x, weight):
    """Wrong: the number of warps, and so the order, follows the number of rows."""
    return launch_rms_norm(x, weight, num_warps=1 if len(x) > 16 else 4)


# Wrong: tl.sum adds in another order with another number of warps, and the autotuner chooses it by time.
varied_kernel = triton.autotune(
    configs=[triton.Config({}, num_warps=warps) for warps in (4, 1)], key=["n"]
)(rms_norm_kernel)


def rms_norm_varied(x, weight):
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    rows, n = x.shape
    varied_kernel[(rows,)](x, weight, out, n, 1e-6, BLOCK=triton.next_power_of_2(n))
    return out


def rms_norm_of_strided(x, weight):
    """Wrong: forgets that inputs may be strided."""
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    rms_norm_kernel[(rows,)](x, weight, out, n, 1e-6, BLOCK=block)
    return out


@triton.jit
def shifted_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at + 1, tl.load(x + at, mask=at < n), mask=at < n)


def silu_outside(x):
    """Wrong: the last element is written behind the output."""
    out = torch.empty_like(x)
    shifted_kernel[(1,)](x.contiguous(), out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


def tiles(*blocks):
    """Return configurations: (rows, products that are added at a time)."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": 16, "BLOCK_K": k}, num_warps=4, num_stages=2)
        for m, k in blocks
    ]


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = (rows[:, None] < M) & (k[None, :] < K)
        right = (k[:, None] < K) & (columns[None, :] < N)
        x = tl.load(a + rows[:, None] * a_row + k[None, :] * a_column, mask=left, other=0.0)
        y = tl.load(b + k[:, None] * b_row + columns[None, :] * b_column, mask=right, other=0.0)
        total += tl.dot(x, y, input_precision="ieee")
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total, mask=inside)


tuned_kernel = triton.autotune(configs=tiles((16, 16), (64, 16)), key=["M", "N", "K"])(
    matmul_kernel
)


def launch_linear(kernel, x, weight, bias):
    (rows, k), columns = x.shape, len(weight)
    out = torch.empty(rows, columns)
    kernel[lambda meta: (triton.cdiv(rows, meta["BLOCK_M"]), triton.cdiv(columns, meta["BLOCK_N"]))](
        x, weight, out, rows, columns, k, *x.stride(), *reversed(weight.stride())
    )  # fmt: skip
    return (out + bias.float()).to(x.dtype)


def linear(x, weight, bias):
    return launch_linear(tuned_kernel, x, weight, bias)


@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + at, value * tl.sigmoid(value), mask=at < n)


@triton.jit
def slope_kernel(x, grad, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    upstream = tl.load(grad + at, mask=at < n, other=0.0).to(tl.float32)
    part = tl.sigmoid(value)
    tl.store(out + at, upstream * part * (1 + value * (1 - part)), mask=at < n)


def elementwise(kernel, *tensors):
    """Launch a kernel of contiguous tensors, 256 elements per program."""
    tensors = [t.contiguous() for t in tensors]
    out = torch.empty_like(tensors[0])
    n = out.numel()
    kernel[(triton.cdiv(n, 256),)](*tensors, out, n, BLOCK=256)
    return out


class Silu(torch.autograd.Function):
    """An activation with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return elementwise(double_kernel, x)

    @staticmethod
    def backward(ctx, grad):
        return elementwise(slope_kernel, ctx.saved_tensors[0], grad)
