"""The Triton executor of AdamW's step. All tensors of a kernel have SIZE elements; a program computes BLOCK of them.

torch's CPU kernels fuse a product with a sum in the mean and in the mean of squares, and not in the last update; so do
these. Each operation rounds to the dtype of the tensors, because torch stores its result there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return fp32 x after a rounding to a dtype."""
    return round_once(x, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["SIZE"])
def adamw(
    p: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    new_p: tl.tensor,
    new_first: tl.tensor,
    new_second: tl.tensor,
    SIZE: tl.tensor,
    DECAY: tl.tensor,
    WEIGHT: tl.tensor,
    KEEP: tl.tensor,
    ADDED: tl.tensor,
    ROOT: tl.tensor,
    EPS: tl.tensor,
    STEP: tl.tensor,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one step; with NEAR, the old mean counts more than half, else WEIGHT is what it counts, negated."""
    dtype: tl.constexpr = new_p.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    old = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    squares = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    value = rounded(tl.load(p + at, mask=inside, other=0.0).to(tl.float32) * DECAY, dtype)
    weight = tl.zeros((BLOCK,), tl.float32) + WEIGHT
    mean = rounded(tl.math.fma(weight, g - old, old if NEAR else g), dtype)
    squares = rounded(tl.math.fma(g * ADDED, g, rounded(squares * KEEP, dtype)), dtype)
    root = rounded(tl.sqrt_rn(squares), dtype)
    divisor = rounded(tl.div_rn(root, tl.zeros((BLOCK,), tl.float32) + ROOT), dtype)
    divisor = rounded(divisor + EPS, dtype)
    value = value + tl.div_rn(mean * STEP, divisor)
    tl.store(new_p + at, round_once(value, dtype), mask=inside)
    tl.store(new_first + at, round_once(mean, dtype), mask=inside)
    tl.store(new_second + at, round_once(squares, dtype), mask=inside)


@triton.jit(do_not_specialize=["SIZE"])
def scale(
    x: tl.tensor, y: tl.tensor, SIZE: tl.tensor, FACTOR: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute y = x · FACTOR."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32) * FACTOR
    tl.store(y + at, round_once(value, y.dtype.element_ty), mask=at < SIZE)


@triton_operator("adamw")
def triton_adamw(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    decay: float,
    weight: float,
    keep: float,
    added: float,
    root: float,
    eps: float,
    size: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new parameter, mean and mean of squares.

    torch's lerp by w is fma(w, g - m, m) for |w| < 1/2, else fma(w - 1, g - m, g), with w and w - 1 in fp32.
    """
    out = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for _ in range(3)]
    narrow = torch.tensor(weight, dtype=torch.float32)
    near = bool(narrow.abs() < 0.5)
    share = float(narrow if near else narrow - 1.0)
    tile = tile_of("adamw", p.dtype, target_of(p))
    run(
        adamw,
        (-(-p.numel() // tile.size),),
        *(tensor.contiguous() for tensor in (p, grad, first, second)),
        *out,
        p.numel(),
        *(decay, share, keep, added, root, eps, size),
        warps=tile.warps,
        NEAR=near,
        BLOCK=tile.size,
    )
    return out[0], out[1], out[2]


@triton_operator("scaled")
def triton_scaled(x: Tensor, factor: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = tile_of("scaled", x.dtype, target_of(x))
    given = (x.contiguous(), y, x.numel(), factor)
    run(scale, (-(-x.numel() // tile.size),), *given, warps=tile.warps, BLOCK=tile.size)
    return y
