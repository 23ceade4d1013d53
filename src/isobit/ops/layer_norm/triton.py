"""The Triton executor of LayerNorm.

x, y, grad and dx are [M, N], contiguous; means and scales are fp32 [M]. A program computes ROWS rows. Each tile is
[ROWS, SEGMENTS * 16]: one column per lane, the lanes of a segment side by side, so that one tree merges lanes and then
segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import row_launch, run
from isobit.ops.gpu.ordered_rows import sum_rows, sum_terms
from isobit.ops.gpu.sums import merge_columns
from isobit.ops.portable.samples import whole_samples
from isobit.ops.share import gradient_dtype


@triton.jit(do_not_specialize=["m"])
def normalise_rows(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    m: tl.tensor,
    eps: tl.tensor,
    BIASED: tl.constexpr,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute y = ((x − mean) · scale) · weight + bias; the mean first, then the scale from (x − mean)²."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    first = (column // 16) * LENGTH + lane
    x += row * N + first
    weight = tl.broadcast_to(weight + first, (ROWS, SEGMENTS * 16))
    if BIASED:
        bias = tl.broadcast_to(bias + first, (ROWS, SEGMENTS * 16))
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        value = tl.load(x + at, mask=(row < m) & known, other=0.0).to(tl.float32)
        total = tl.where(known, total + value, total)
    mean = tl.div_rn(merge_columns(total, ROWS, SEGMENTS * 16), N * 1.0)  # [ROWS, 1]
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        rest = tl.load(x + at, mask=(row < m) & known, other=0.0).to(tl.float32) - mean
        total = tl.where(known, total + rest * rest, total)
    variance = tl.div_rn(merge_columns(total, ROWS, SEGMENTS * 16), N * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))  # [ROWS, 1]
    tl.store(means + row, mean, mask=row < m)
    tl.store(scales + row, scale, mask=row < m)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        rest = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        result = (rest * scale) * factor
        if BIASED:
            result = result + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        result = round_once(result, y.dtype.element_ty)
        tl.store(y + row * N + first + at, result, mask=inside)


@triton.jit(do_not_specialize=["m"])
def differentiate_rows(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    dx: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute dx = scale · ((a − Σ a / N) − x̂ · (Σ a · x̂ / N)), a = grad · weight and x̂ = (x − mean) · scale."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    first = (column // 16) * LENGTH + lane
    x += row * N + first
    weight = tl.broadcast_to(weight + first, (ROWS, SEGMENTS * 16))
    grad += row * N + first
    mean = tl.load(means + row, mask=row < m, other=0.0)  # [ROWS, 1]
    scale = tl.load(scales + row, mask=row < m, other=0.0)  # [ROWS, 1]
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    plain = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        weighted = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        total = tl.where(known, total + weighted * normal, total)
        plain = tl.where(known, plain + weighted, plain)
    share = tl.div_rn(merge_columns(total, ROWS, SEGMENTS * 16), N * 1.0)  # [ROWS, 1]
    level = tl.div_rn(merge_columns(plain, ROWS, SEGMENTS * 16), N * 1.0)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        weighted = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        result = ((weighted - level) - normal * share) * scale
        result = round_once(result, dx.dtype.element_ty)
        tl.store(dx + row * N + first + at, result, mask=inside)


@triton_operator("layer_norm")
def triton_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, spans: Tensor | None, of: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    means = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    factor = weight.contiguous()
    added = factor if bias is None else bias.contiguous()
    rows, grid, how = row_launch("layer_norm", x)
    given = (x.contiguous(), factor, added, y, means, scales, rows, eps)
    run(normalise_rows, grid, *given, BIASED=bias is not None, **how)
    return y, means, scales


@triton_operator("layer_norm_backward")
def triton_layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    spans: Tensor | None,
    of: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    means, scales = means.contiguous(), scales.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, grid, how = row_launch("layer_norm_backward", x)
    run(differentiate_rows, grid, grad, x, weight.contiguous(), means, scales, dx, rows, **how)
    samples = whole_samples(grad, spans, of)
    dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
    dbias = sum_rows(grad.reshape(-1, x.shape[-1]), samples, dtype)
    return dx, sum_terms(grad, x, means, scales, samples, 0), dbias
