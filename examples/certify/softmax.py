"""Softmax of rows in Triton: `tl.sum` adds in an order that depends on the number of warps.

Try, from the root of the repository:

    isobit certify examples/certify/softmax.py:softmax --rows 1,3,20
    isobit certify examples/certify/softmax.py:warps_by_rows --rows 1,3,20
    isobit certify examples/certify/softmax.py:softmax_tree --rows 1,3,20 --vary num_warps=1,2,4,8
"""

import torch
import triton
import triton.language as tl

N = 512


@triton.jit
def softmax_kernel(x, out, n_rows, n_cols, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    # As many programs as the GPU runs at once; each takes every so-many-th row.
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        values = tl.load(x + row * n_cols + columns, mask=columns < n_cols, other=-float("inf"))
        numerator = tl.exp(values - tl.max(values, axis=0))
        denominator = tl.sum(numerator, axis=0)
        tl.store(out + row * n_cols + columns, numerator / denominator, mask=columns < n_cols)


@triton.jit
def add_in_pairs(values, LEVELS: tl.constexpr):
    """Add 2**LEVELS values, neighbours first: only `+`, so that no layout changes the order."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(values, (1 << (LEVELS - 1 - level), 2)))
        values = left + right
    return values  # [1]


@triton.jit
def softmax_tree_kernel(x, out, n_cols, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    values = tl.load(x + row * n_cols + columns, mask=columns < n_cols, other=-float("inf"))
    numerator = tl.exp(values - tl.max(values, axis=0))
    denominator = add_in_pairs(numerator, LEVELS)
    tl.store(out + row * n_cols + columns, numerator / denominator, mask=columns < n_cols)


def normalize(x, num_warps, programs=64):
    """Return the softmax of each row."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    grid = (min(rows, programs),)
    softmax_kernel[grid](x, out, rows, columns, block, num_warps=num_warps)
    return out


def softmax(rows, num_warps=4):
    """Certify a softmax whose warps depend on the length of a row, and so on nothing here."""
    return normalize(torch.randn(rows, N), num_warps)


def warps_by_rows(rows):
    """Certify a softmax that takes more warps for few rows, to be done sooner."""
    return normalize(torch.randn(rows, N), num_warps=8 if rows < 8 else 4)


def softmax_tree(rows, num_warps=4):
    """Certify a softmax that adds in pairs: the warps may be chosen freely."""
    x = torch.randn(rows, N)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    levels = block.bit_length() - 1
    softmax_tree_kernel[(rows,)](x, out, N, block, levels, num_warps=num_warps)
    return out
