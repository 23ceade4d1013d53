"""The Triton executor of log-softmax, over pairs of maximum and sum, one pair per segment.

x, y, grad and dx are [M, N], contiguous. A program computes ROWS rows. Each tile is [ROWS, SEGMENTS * 16]: one column
per lane, the lanes of a segment side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import exp_nonpositive, log_positive, round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import row_launch, run
from isobit.ops.gpu.sums import merge_columns, merge_pairs


@triton.jit(do_not_specialize=["m"])
def log_softmax(
    x: tl.tensor,
    y: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute y = (x − max) − log Σ exp(x − max)."""
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
    tops = tl.max(tl.reshape(most, (ROWS, SEGMENTS, 16)), 2)  # [ROWS, SEGMENTS]
    base = tl.where(tops == -float("inf"), 0.0, tops)
    base = tl.broadcast_to(base[:, :, None], (ROWS, SEGMENTS, 16))
    base = tl.reshape(base, (ROWS, SEGMENTS * 16))
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        value = tl.load(x + place + at, mask=(row < m) & known, other=0.0).to(tl.float32)
        total = tl.where(known, total + exp_nonpositive(value - base), total)
    sums = merge_columns(tl.reshape(total, (ROWS * SEGMENTS, 16)), ROWS * SEGMENTS, 16)
    top, whole = merge_pairs(tops, tl.reshape(sums, (ROWS, SEGMENTS)), ROWS, SEGMENTS)
    log_sum = log_positive(whole)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        value = tl.load(x + place + at, mask=inside, other=0.0).to(tl.float32)
        result = round_once((value - top) - log_sum, y.dtype.element_ty)
        tl.store(y + place + at, result, mask=inside)


@triton.jit(do_not_specialize=["m"])
def log_softmax_grad(
    grad: tl.tensor,
    y: tl.tensor,
    dx: tl.tensor,
    m: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute dx = grad − exp(y) · Σ grad."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    place = row * N + (column // 16) * LENGTH + lane
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH, 16):
        known = at + lane < LENGTH
        upstream = tl.load(grad + place + at, mask=(row < m) & known, other=0.0).to(tl.float32)
        total = tl.where(known, total + upstream, total)
    whole = merge_columns(total, ROWS, SEGMENTS * 16)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        inside = (row < m) & (at + lane < LENGTH)
        weight = exp_nonpositive(tl.load(y + place + at, mask=inside, other=0.0).to(tl.float32))
        upstream = tl.load(grad + place + at, mask=inside, other=0.0).to(tl.float32)
        result = round_once(upstream - weight * whole, dx.dtype.element_ty)
        tl.store(dx + place + at, result, mask=inside)


@triton_operator("log_softmax")
def triton_log_softmax(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, grid, how = row_launch("log_softmax", x)
        run(log_softmax, grid, x.contiguous(), y, rows, **how)
    return y


@triton_operator("log_softmax_backward")
def triton_log_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        rows, grid, how = row_launch("log_softmax_backward", y)
        run(log_softmax_grad, grid, grad.contiguous(), y.contiguous(), dx, rows, **how)
    return dx
