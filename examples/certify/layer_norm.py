"""Layer norm in Triton: warps by a rule, and warps by the autotuner.

Try, from the root of the repository:

    isobit certify examples/certify/layer_norm.py:layer_norm --rows 1,3,20
    isobit certify examples/certify/layer_norm.py:autotuned --rows 1,3,20
"""

import torch
import triton
import triton.language as tl

N = 384  # not a power of two, as in small models


@triton.jit
def layer_norm_kernel(x, weight, bias, out, n_rows, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n_cols
    values = tl.load(x + row * n_cols + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / n_cols
    centred = tl.where(inside, values - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / n_cols
    scaled = centred * (1 / tl.sqrt(variance + eps))
    w = tl.load(weight + columns, mask=inside)
    b = tl.load(bias + columns, mask=inside)
    tl.store(out + row * n_cols + columns, (scaled * w + b).to(out.dtype.element_ty), mask=inside)


# A key with the number of rows lets two batches run two configurations.
autotuned_kernel = triton.autotune(
    configs=[triton.Config({}, num_warps=warps) for warps in (1, 2, 4, 8)],
    key=["n_rows", "n_cols"],
)(layer_norm_kernel)


def normalize(x, weight, bias, eps=1e-5):
    """Return the layer norm of each row."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    # The usual rule: warps from the length of a row. It does not look at the number of rows.
    warps = min(max(block // 256, 1), 8)
    layer_norm_kernel[(rows,)](x, weight, bias, out, rows, columns, eps, block, num_warps=warps)
    return out


def operands(rows):
    """Return inputs of the shapes to certify. Their values do not matter: every float is a symbol."""
    return torch.randn(rows, N), torch.randn(N), torch.randn(N)


def layer_norm(rows):
    """Certify a layer norm: one program per row."""
    return normalize(*operands(rows))


def autotuned(rows):
    """Certify what the autotuner may pick."""
    x, weight, bias = operands(rows)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(N)
    autotuned_kernel[(rows,)](x, weight, bias, out, rows, N, 1e-5, block)
    return out
