"""The Triton executor of the rotary embedding.

x and y are [TOKENS, HEADS, 2 * HALF], contiguous; cos and sin are [PERIOD, 2 * HALF], and token t has the angles
t % PERIOD. A program rotates BLOCK pairs; pairs are numbered as [TOKENS, HEADS, HALF].
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


@triton.jit(do_not_specialize=["size", "period"])
def rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    period: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotate pairs (low, high) by the angles of their token, or by the opposite angles; size is the number of pairs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    place = at // HALF * (2 * HALF) + at % HALF
    angle = at // (HALF * HEADS) % period * (2 * HALF) + at % HALF
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        first = low * cos_low + high * sin_high
        second = high * cos_high - low * sin_low
    else:
        first = low * cos_low - high * sin_low
        second = high * cos_high + low * sin_high
    tl.store(y + place, round_once(first, y.dtype.element_ty), mask=inside)
    tl.store(y + place + HALF, round_once(second, y.dtype.element_ty), mask=inside)


def repeated(angles: Tensor, tokens: torch.Size) -> Tensor:
    """Return angles as [period, D], contiguous: token t of the leading axes `tokens` has row t % period."""
    leading = list(angles.shape[:-1])
    while leading and leading[0] == 1:
        del leading[0]
    repeats = leading == list(tokens[len(tokens) - len(leading) :])
    rows = angles if repeats else angles.expand(*tokens, angles.shape[-1])
    return rows.reshape(-1, angles.shape[-1]).contiguous()


def rotated(name: str, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x [..., heads, D] rotated."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cosines, sines = repeated(cos, x.shape[:-2]), repeated(sin, x.shape[:-2])
    size, tile = x.numel() // 2, tile_of(name, x.dtype, target_of(x))
    run(
        rotate,
        (-(-size // tile.size),),
        x.contiguous(),
        cosines,
        sines,
        y,
        size,
        len(cosines),
        warps=tile.warps,
        HEADS=x.shape[-2],
        HALF=x.shape[-1] // 2,
        INVERSE=inverse,
        BLOCK=tile.size,
    )
    return y


@triton_operator("rotary")
def triton_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated("rotary", x, cos, sin, False)


@triton_operator("rotary_backward")
def triton_rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated("rotary_backward", grad, cos, sin, True)
