"""RMS norm in Triton: several rows per program, as many as a heuristic picks.

Try, from the root of the repository:

    isobit certify examples/certify/rms_norm.py:rms_norm --rows 1,3,20
    isobit certify examples/certify/rms_norm.py:tile_by_rows --rows 1,3,20
"""

import torch
import triton
import triton.language as tl

N = 512


@triton.jit
def rms_norm_kernel(
    x,  # [n_rows, n_cols]
    weight,  # [n_cols]
    out,  # [n_rows, n_cols]
    n_rows,
    n_cols,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows[:, None] < n_rows) & (columns[None, :] < n_cols)
    at = rows[:, None] * n_cols + columns[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    mean_square = tl.sum(values * values, axis=1) / n_cols
    scaled = values * tl.rsqrt(mean_square + eps)[:, None]
    w = tl.load(weight + columns, mask=columns < n_cols, other=0.0).to(tl.float32)
    tl.store(out + at, (scaled * w[None, :]).to(out.dtype.element_ty), mask=inside)


def normalize(x, weight, rows_per_program, num_warps=4, eps=1e-6):
    """Return the RMS norm of each row."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    grid = (triton.cdiv(rows, rows_per_program),)
    # Without fusion: on sm_100 ptxas would fuse the division's product with the addition of eps, or not.
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    rms_norm_kernel[grid](x, weight, out, rows, columns, eps, rows_per_program, block, **options)
    return out


def operands(rows):
    """Return inputs of the shapes to certify."""
    return torch.randn(rows, N).to(torch.bfloat16), torch.randn(N).to(torch.bfloat16)


def rms_norm(rows, ROWS=1, num_warps=4):
    """Certify a fixed number of rows per program."""
    return normalize(*operands(rows), ROWS, num_warps)


def tile_by_rows(rows):
    """Certify more rows per program when there are many: the layout of `tl.sum` follows."""
    return normalize(*operands(rows), rows_per_program=1 if rows < 16 else 8)
