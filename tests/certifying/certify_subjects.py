"""Functions that tests certify: right ones, and wrong ones that must be caught."""

import torch
import triton
import triton.language as tl

WIDTH = 64


@triton.jit
def norm_kernel(x, out, rows, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, WIDTH)
    values = tl.load(x + row * WIDTH + at)
    mean = tl.sum(values * values) / WIDTH
    tl.store(out + row * WIDTH + at, values / tl.sqrt_rn(mean + 1e-6))


@triton.jit
def sum_kernel(x, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(x + row * WIDTH + tl.arange(0, WIDTH))))


@triton.jit
def chain_kernel(x, out, stride, WIDTH: tl.constexpr, FROM: tl.constexpr, BY: tl.constexpr):
    # A sum from left to right; FROM and BY choose another row to read, which is wrong.
    row = tl.program_id(0)
    total = 0.0
    for k in range(WIDTH):
        total += tl.load(x + (row * BY + FROM) * stride + k)
    tl.store(out + row, total)


@triton.jit
def add_kernel(x, y, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@triton.jit
def unmasked_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + 1.0, mask=at < size)


@triton.jit
def atomic_kernel(x, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    part = tl.program_id(1)
    tl.atomic_add(out + row, tl.load(x + row * WIDTH + part))


@triton.jit
def gather_kernel(x, index, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    chosen = tl.load(index + row)
    tl.store(out + row, tl.load(x + row * WIDTH + chosen) + tl.load(x + row * WIDTH))


@triton.jit
def branch_kernel(x, out, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    value = tl.load(x + row * WIDTH)
    if value > 0:
        value = value + tl.load(x + row * WIDTH + 1)
    tl.store(out + row, value)


def make(rows, dtype=torch.float32):
    return torch.randn(rows, WIDTH, dtype=dtype)


def sums(rows, num_warps=4):
    """One row per program, `tl.sum`: its order depends on num_warps and on nothing else."""
    x = make(rows)
    out = torch.empty(rows)
    sum_kernel[(rows,)](x, out, WIDTH, num_warps=num_warps)
    return out


def norm(rows, num_warps=1):
    x = make(rows)
    out = torch.empty_like(x)
    norm_kernel[(rows,)](x, out, rows, WIDTH, num_warps=num_warps, enable_fp_fusion=False)
    return out


def chain(rows, FROM=0, BY=1):
    x = torch.randn(rows + FROM, WIDTH)[FROM:] if FROM else make(rows)
    out = torch.empty(rows)
    chain_kernel[(rows,)](x, out, WIDTH, 4, 0, BY, num_warps=1)
    return out


def reads_row_zero(rows):
    return chain(rows, BY=0)


def two_launches(rows, BLOCK=64):
    x, y = make(rows), make(rows)
    middle, out = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    add_kernel[grid](x, y, middle, x.numel(), BLOCK, num_warps=1)
    add_kernel[grid](middle.view(-1), x, out, x.numel(), BLOCK, num_warps=1)
    return out


def torch_between(rows):
    x = make(rows)
    out = torch.empty(rows)
    sum_kernel[(rows,)](x, out, WIDTH, num_warps=1)
    return out.sum().expand(rows)


def changes_input(rows):
    x = make(rows)
    out, again = torch.empty(rows), torch.empty(rows)
    sum_kernel[(rows,)](x, out, WIDTH, num_warps=1)
    x.mul_(2)
    sum_kernel[(rows,)](x, again, WIDTH, num_warps=1)
    return again


def atomic(rows):
    x = make(rows)
    out = torch.zeros(rows)
    atomic_kernel[(rows, 4)](x, out, WIDTH, num_warps=1)
    return out


def out_of_bounds(rows):
    x = make(rows)
    out = torch.empty_like(x)
    unmasked_kernel[(rows,)](x, out, x.numel(), 128, num_warps=1)
    return out


def half_written(rows):
    x = make(rows)
    out = torch.empty_like(x)
    add_kernel[(1,)](x, x, out, x.numel(), 32, num_warps=1)
    return out


def by_integers(rows):
    x = make(rows)
    index = torch.arange(rows) * 7 % WIDTH
    out = torch.empty(rows)
    gather_kernel[(rows,)](x, index, out, WIDTH, num_warps=1)
    return out


def data_branch(rows):
    x = make(rows)
    out = torch.empty(rows)
    branch_kernel[(rows,)](x, out, WIDTH, num_warps=1)
    return out


def transposed(rows):
    x = torch.randn(WIDTH, rows).t()
    out = torch.empty(rows)
    chain_kernel[(rows,)](x.contiguous(), out, WIDTH, 4, 0, 1, num_warps=1)
    return out


@triton.jit
def column_kernel(x, out, rows, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for k in range(WIDTH):
        total += tl.load(x + k * rows + row)
    tl.store(out + row, total)


def columns(rows):
    """Inputs that are not contiguous: rows are columns in memory."""
    x = torch.randn(4, rows).t()
    out = torch.empty(rows)
    column_kernel[(rows,)](x, out, rows, 4, num_warps=1)
    return out


@triton.autotune(
    configs=[triton.Config({}, num_warps=1), triton.Config({}, num_warps=4)], key=["WIDTH"]
)
@triton.heuristics({"DOUBLE": lambda given: given["WIDTH"] * 2})
@triton.jit
def tuned_kernel(x, out, WIDTH: tl.constexpr, DOUBLE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, DOUBLE)
    values = tl.load(x + row * WIDTH + at, mask=at < WIDTH, other=0.0)
    tl.store(out + row, tl.sum(values))


def tuned(rows):
    x = make(rows)
    out = torch.empty(rows)
    tuned_kernel[(rows,)](x, out, WIDTH)
    return out


def raises(rows):
    raise ValueError("not today")


def nothing(rows):
    return make(rows)


def not_written(rows):
    x = make(rows)
    out = torch.empty(rows)
    sum_kernel[(rows,)](x, out, WIDTH, num_warps=1)
    return x


def on_cuda(rows):
    """What no stand-in has: the CUDA runtime."""
    return torch.randn(rows, WIDTH) * torch.cuda.cudart().cudaDeviceGetCount()


def flattened(rows):
    """Outputs of rows × 4 entries in one axis."""
    x = torch.randn(rows * 4, WIDTH)
    out = torch.empty(rows * 4)
    sum_kernel[(rows * 4,)](x, out, WIDTH, num_warps=1)
    return out


def padded(rows):
    x = torch.randn((rows + 15) // 16 * 16, WIDTH)
    out = torch.empty(rows)
    sum_kernel[(rows,)](x, out, WIDTH, num_warps=1)
    return out


def no_rows(num_warps=1):
    x = make(2)
    out = torch.empty(2)
    sum_kernel[(2,)](x, out, WIDTH, num_warps=num_warps)
    return out


def scaled(rows):
    x = make(rows)
    y = x.abs().max().expand(rows, WIDTH).contiguous()
    out = torch.empty_like(x)
    add_kernel[(rows,)](x, y, out, x.numel(), WIDTH, num_warps=1)
    return out


def warps_by_rows(rows, num_warps=1):
    """Wrong: a heuristic that gives more rows more warps, and so another order to `tl.sum`."""
    return norm(rows, num_warps=4 if rows > 2 else 1)


@triton.jit
def fusing_kernel(x, out, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x + at)
    tl.store(out + at, values * values + values)


def fusing(rows, fused=True):
    x = make(rows)
    out = torch.empty_like(x)
    fusing_kernel[(rows,)](x, out, WIDTH, num_warps=1, enable_fp_fusion=fused)
    return out
