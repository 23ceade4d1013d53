"""The Triton executor of softmax.

x, y, grad and dx are [M, N], contiguous. A program computes ROWS rows. Each tile is [ROWS, SEGMENTS * 16]: one column
per lane, the lanes of a segment side by side, so that one tree merges lanes and then segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import exp_nonpositive, round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import row_launch, run
from isobit.ops.gpu.sums import merge_columns


@triton.jit(do_not_specialize=["m"])
def softmax(
    x: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute y = exp(x − max) / Σ exp(x − max). The maximum has no order."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    place = row * N + (column // 16) * LENGTH + lane
    most = tl.full((ROWS, SEGMENTS * 16), -float("inf"), tl.float32)
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        value = tl.load(x + place + at, mask=inside, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, value)
    top = tl.max(most, 1)[:, None]  # [ROWS, 1]
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH // 16 * 16, 16):
        value = tl.load(x + place + at, mask=row < m, other=0.0).to(tl.float32)
        total = total + exp_nonpositive(value - top)
    if LENGTH % 16 != 0:
        TAIL: tl.constexpr = LENGTH // 16 * 16
        known = TAIL + lane < LENGTH
        value = tl.load(x + place + TAIL, mask=(row < m) & known, other=0.0).to(tl.float32)
        total = tl.where(known, total + exp_nonpositive(value - top), total)
    whole = merge_columns(total, ROWS, SEGMENTS * 16)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        value = tl.load(x + place + at, mask=inside, other=0.0).to(tl.float32)
        term = exp_nonpositive(value - top)
        term, divisor = tl.broadcast(term, whole)
        result = round_once(tl.div_rn(term, divisor), y.dtype.element_ty)
        tl.store(y + place + at, result, mask=inside)


@triton.jit(do_not_specialize=["m"])
def softmax_grad(
    grad: tl.tensor,
    y: tl.tensor,
    dx: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute dx = y · (grad − Σ y · grad)."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    place = row * N + (column // 16) * LENGTH + lane
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        inside = (row < m) & known
        weight = tl.load(y + place + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + place + at, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(known, total + weight * upstream, total)
    whole = merge_columns(total, ROWS, SEGMENTS * 16)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        weight = tl.load(y + place + at, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(grad + place + at, mask=inside, other=0.0).to(tl.float32)
        result = round_once(weight * (upstream - whole), dx.dtype.element_ty)
        tl.store(dx + place + at, result, mask=inside)


@triton_operator("softmax")
def triton_softmax(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, grid, how = row_launch("softmax", x)
        run(softmax, grid, x.contiguous(), y, rows, **how)
    return y


@triton_operator("softmax_backward")
def triton_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        rows, grid, how = row_launch("softmax_backward", y)
        run(softmax_grad, grid, grad.contiguous(), y.contiguous(), dx, rows, **how)
    return dx
