"""Kernels of the example project: what its workflow certifies, checks and judges."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x, y, n, BLOCK: tl.constexpr):
    """Compute one row of [rows, n] per program, in one block."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    values = tl.load(x + row * n + columns, mask=inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * n + columns, powers / tl.sum(powers, axis=0), mask=inside)


def softmax(rows):
    """Launch the kernel: what `isobit certify` compiles, for several numbers of rows."""
    x = torch.randn(rows, 200)
    y = torch.empty_like(x)
    softmax_kernel[(rows,)](x, y, 200, BLOCK=256)
    return y


def silu(x):
    """Compute x · sigmoid(x) in fp64: torch's fp32 sigmoid depends on where a value is stored."""
    wide = x.double()
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def centre(x):
    """Subtract the mean of each row, one row at a time, so that no row can depend on another."""
    rows = [row - row.double().sum().div(row.numel()).float() for row in x.contiguous()]
    return torch.stack(rows) if rows else torch.empty_like(x)


def reference_of_centre(x):
    """Compute the same by the formula; it is called on fp64."""
    return x - x.mean(-1, keepdim=True)
