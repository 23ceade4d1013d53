"""The Triton executor of RMSNorm.

x, y, grad and dx are [M, N], contiguous. A program computes ROWS rows. Each tile is [ROWS, SEGMENTS * 16]: one column
per lane, the lanes of a segment side by side, so that one tree merges lanes and then segments. Weights are loaded for
each row: as a tile of one row they would have a different layout, and each load would need barriers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import row_launch, run
from isobit.ops.gpu.ordered_rows import sum_terms
from isobit.ops.gpu.sums import merge_columns
from isobit.ops.portable.samples import whole_samples


@triton.jit(do_not_specialize=["m"])
def normalise_rows(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    scales: tl.tensor,
    m: tl.tensor,
    eps: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute y = (x · scale) · weight with scale = 1 / sqrt(Σ x² / N + eps); scales is fp32 [m]."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    first = (column // 16) * LENGTH + lane
    x += row * N + first
    weight = tl.broadcast_to(weight + first, (ROWS, SEGMENTS * 16))
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH // 16 * 16, 16):
        value = tl.load(x + at, mask=row < m, other=0.0).to(tl.float32)
        total = total + value * value
    if LENGTH % 16 != 0:  # the lanes beyond the end add nothing
        TAIL: tl.constexpr = LENGTH // 16 * 16
        known = TAIL + lane < LENGTH
        value = tl.load(x + TAIL, mask=(row < m) & known, other=0.0).to(tl.float32)
        total = tl.where(known, total + value * value, total)
    mean = tl.div_rn(merge_columns(total, ROWS, SEGMENTS * 16), N * 1.0)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))  # [ROWS, 1]
    tl.store(scales + row, scale, mask=row < m)
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        result = round_once((value * scale) * factor, y.dtype.element_ty)
        tl.store(y + row * N + first + at, result, mask=inside)


@triton.jit(do_not_specialize=["m"])
def differentiate_rows(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    dx: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute dx = scale · (a − x̂ · (Σ a · x̂ / N)) with a = grad · weight and x̂ = x · scale."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    first = (column // 16) * LENGTH + lane
    x += row * N + first
    weight = tl.broadcast_to(weight + first, (ROWS, SEGMENTS * 16))
    grad += row * N + first
    scale = tl.load(scales + row, mask=row < m, other=0.0)  # [ROWS, 1]
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        weighted = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        total = tl.where(known, total + weighted * normal, total)
    share = tl.div_rn(merge_columns(total, ROWS, SEGMENTS * 16), N * 1.0)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        normal = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        weighted = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
        result = round_once((weighted - normal * share) * scale, dx.dtype.element_ty)
        tl.store(dx + row * N + first + at, result, mask=inside)


@triton_operator("rms_norm")
def triton_rms_norm(
    x: Tensor, weight: Tensor, eps: float, spans: Tensor | None, heads: bool, of: int = 0
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, grid, how = row_launch("rms_norm", x)
    run(normalise_rows, grid, x.contiguous(), weight.contiguous(), y, scales, rows, eps, **how)
    return y, scales


@triton_operator("rms_norm_backward")
def triton_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    spans: Tensor | None,
    heads: bool,
    of: int = 0,
) -> tuple[Tensor, Tensor]:
    grad, x, scales = grad.contiguous(), x.contiguous(), scales.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, grid, how = row_launch("rms_norm_backward", x)
    run(differentiate_rows, grid, grad, x, weight.contiguous(), scales, dx, rows, **how)
    samples = whole_samples(grad.select(-2, 0) if heads else grad, spans, of)
    return dx, sum_terms(grad, x, None, scales, samples, x.shape[-2] if heads else 0)
