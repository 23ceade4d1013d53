"""The Triton executor of AdamW's step. All tensors of a kernel have SIZE elements; a program computes BLOCK of them.

The operations are those of [Note: the step] in portable.py: in fp32, none fused, and one rounding per result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of


@triton.jit(do_not_specialize=["size"])
def adamw(
    p: tl.tensor,
    grad: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    new_p: tl.tensor,
    new_first: tl.tensor,
    new_second: tl.tensor,
    size: tl.tensor,
    decay: tl.tensor,
    keep_mean: tl.tensor,
    add_mean: tl.tensor,
    keep_square: tl.tensor,
    add_square: tl.tensor,
    spread: tl.tensor,
    eps: tl.tensor,
    rate: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one step with the gradient scaled by factor, as `scale` would; the new tensors may be the old ones."""
    dtype: tl.constexpr = new_p.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * factor
    g = round_once(g, dtype).to(tl.float32)
    mean = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    mean = mean * keep_mean + g * add_mean
    square = square * keep_square + (g * add_square) * g
    divisor = tl.sqrt_rn(square) * spread + eps
    value = value * decay - tl.div_rn(mean * rate, divisor)
    tl.store(new_p + at, round_once(value, dtype), mask=inside)
    tl.store(new_first + at, round_once(mean, dtype), mask=inside)
    tl.store(new_second + at, round_once(square, dtype), mask=inside)


@triton.jit(do_not_specialize=["size"])
def scale(
    x: tl.tensor, y: tl.tensor, size: tl.tensor, factor: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute y = x · factor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * factor
    tl.store(y + at, round_once(value, y.dtype.element_ty), mask=at < size)


def launch_step(given: Sequence[Tensor], out: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """Launch a step of contiguous p, grad, first and second into contiguous new p, first and second."""
    p = given[0]
    tile = tile_of("adamw", p.dtype, target_of(p))
    grid = (-(-p.numel() // tile.size),)
    run(adamw, grid, *given, *out, p.numel(), *numbers, warps=tile.warps, BLOCK=tile.size)


@triton_operator("adamw")
def triton_adamw(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    decay: float,
    keep_mean: float,
    add_mean: float,
    keep_square: float,
    add_square: float,
    spread: float,
    eps: float,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new parameter, mean and mean of squares."""
    out = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for _ in range(3)]
    given = [tensor.contiguous() for tensor in (p, grad, first, second)]
    numbers = (decay, keep_mean, add_mean, keep_square, add_square, spread, eps, rate, 1.0)
    launch_step(given, out, numbers)
    return out[0], out[1], out[2]


@triton_operator("adamw_", mutates=("p", "first", "second"))
def triton_adamw_(
    p: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    decay: float,
    keep_mean: float,
    add_mean: float,
    keep_square: float,
    add_square: float,
    spread: float,
    eps: float,
    rate: float,
    factor: float,
) -> None:
    """Step contiguous tensors in place: four reads and three writes of memory."""
    numbers = (decay, keep_mean, add_mean, keep_square, add_square, spread, eps, rate, factor)
    launch_step((p, grad, first, second), (p, first, second), numbers)


@triton_operator("scaled")
def triton_scaled(x: Tensor, factor: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_scale(x.contiguous(), y, factor)
    return y


@triton_operator("scaled_", mutates=("x",))
def triton_scaled_(x: Tensor, factor: float) -> None:
    """Scale a contiguous tensor in place."""
    launch_scale(x, x, factor)


def launch_scale(x: Tensor, y: Tensor, factor: float) -> None:
    """Launch y = x · factor of contiguous tensors."""
    tile = tile_of("scaled", x.dtype, target_of(x))
    given = (x, y, x.numel(), factor)
    run(scale, (-(-x.numel() // tile.size),), *given, warps=tile.warps, BLOCK=tile.size)
