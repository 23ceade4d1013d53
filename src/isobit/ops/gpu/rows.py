"""RMSNorm and softmax of rows: a row is cut into SEGMENTS segments, each added by 16 interleaved lanes.

x and y are [M, N], contiguous. A program computes ROWS rows; the grid is one-dimensional. Each tile below is
[ROWS, SEGMENTS * 16]: one column per lane, the lanes of a segment side by side, so that one tree merges lanes and then
segments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import exp_nonpositive, round_once
from isobit.ops.gpu.sums import merge_columns


@triton.jit
def softmax(
    x: tl.tensor,
    y: tl.tensor,
    M: tl.tensor,
    N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute y = exp(x − max) / Σ exp(x − max). The maximum has no order."""
    LENGTH: tl.constexpr = N // SEGMENTS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SEGMENTS * 16)[None, :]
    lane = column % 16
    place = row * N + (column // 16) * LENGTH + lane
    most = tl.full((ROWS, SEGMENTS * 16), -float("inf"), tl.float32)
    for at in range(0, LENGTH, 16):
        inside = (row < M) & (at + lane < LENGTH)
        value = tl.load(x + place + at, mask=inside, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, value)
    top = tl.max(most, 1)[:, None]  # [ROWS, 1]
    total = tl.zeros((ROWS, SEGMENTS * 16), tl.float32)
    for at in range(0, LENGTH // 16 * 16, 16):
        value = tl.load(x + place + at, mask=row < M, other=0.0).to(tl.float32)
        total = total + exp_nonpositive(value - top)
    if LENGTH % 16 != 0:
        TAIL: tl.constexpr = LENGTH // 16 * 16
        inside = TAIL + lane < LENGTH
        value = tl.load(x + place + TAIL, mask=(row < M) & inside, other=0.0).to(tl.float32)
        total = tl.where(inside, total + exp_nonpositive(value - top), total)
    whole = merge_columns(total, ROWS, SEGMENTS * 16)  # [ROWS, 1]
    for at in range(0, LENGTH, 16):
        inside = (row < M) & (at + lane < LENGTH)
        value = tl.load(x + place + at, mask=inside, other=0.0).to(tl.float32)
        term = exp_nonpositive(value - top)
        term, divisor = tl.broadcast(term, whole)
        tl.store(
            y + place + at, round_once(tl.div_rn(term, divisor), y.dtype.element_ty), mask=inside
        )
