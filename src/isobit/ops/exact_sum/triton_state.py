"""The digits of an exact sum, or of an exact sum of squares, on a GPU; a state of the CPU's form.

See [Note: digits on a GPU] in triton.py. Digit i counts 2^(32 i - 320), so that the square of the least fp32 value has
its place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.exact_sum import portable
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of

DIGITS = tl.constexpr(portable.DIGITS)
STATE = tl.constexpr(portable.STATE_SIZE)
TOGETHER = tl.constexpr(4)  # neighbouring values that one lane loads
TILES = 32  # tiles of values that one program adds


@triton.jit
def pieces_of(bits: tl.tensor, SQUARED: tl.constexpr) -> tuple[tl.tensor, tl.tuple]:
    """Return the digit that the lowest bit of values falls into, and what they add there and above.

    Finite values only; infinities and NaN add nothing. A piece is less than 2^32 in magnitude. A value has two, a
    square three: 48 bits are shifted by at most 31.
    """
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    whole = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
    whole = tl.where(exponent < 0xFF, whole, 0)
    shift = tl.maximum(exponent, 1) - 1  # the value is whole · 2^(shift - 149)
    if SQUARED:
        place = 2 * shift + 22
        up = (place % 32).to(tl.int64)
        square = whole * whole
        low, middle = (square << up).to(tl.uint32), (square >> (32 - up)).to(tl.uint32)
        pieces: tl.tuple = (low, middle, (square >> 32 >> (32 - up)).to(tl.uint32))
    else:
        place = shift + 171
        sign = tl.where(bits < 0, -1, 1).to(tl.int64)
        placed = whole << (place % 32).to(tl.int64)
        pieces = ((placed & 0xFFFFFFFF) * sign, (placed >> 32) * sign)
    return place // 32, pieces


@triton.jit
def counts_of(bits: tl.tensor, SQUARED: tl.constexpr) -> tl.tuple:
    """Return, per value, whether it (or its square) is NaN, +inf and -inf."""
    size = bits & 0x7FFFFFFF
    infinite = size == 0x7F800000
    below = infinite & (bits < 0) & (not SQUARED)
    return (size > 0x7F800000, infinite ^ below, below)


@triton.jit(do_not_specialize=["size"])
def add_digits(
    x: tl.tensor,
    states: tl.tensor,
    size: tl.tensor,
    SQUARED: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Store the digits of the sum of TILES tiles of values, or of their squares, in states [programs, STATE].

    A tile is [LANES, TOGETHER]. Every lane keeps its digits, int64 [LANES] each, from tile to tile, and lanes are added
    once, at the end: a barrier per digit and program, not per tile. Nothing is carried, and nothing can overflow: a
    value adds at most one piece to a digit, less than 2^32 in magnitude, so any sum of at most MOST_AT_ONCE = 2^28
    values is less than 2^60, be it of a lane, of a program or of all.
    """
    TILE: tl.constexpr = LANES * TOGETHER
    inside = tl.arange(0, LANES)[:, None] * TOGETHER + tl.arange(0, TOGETHER)[None, :]
    first = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    last = tl.minimum(first + TILE * TILES, size)
    sums: tl.tuple = ()
    for _ in tl.static_range(DIGITS):
        sums += (tl.zeros([LANES], tl.int64),)
    none = tl.zeros([LANES], tl.int32)
    counts: tl.tuple = (none, none, none)
    for start in range(first, last, TILE):
        at = start + inside
        value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)  # [LANES, TOGETHER]
        bits = value.to(tl.int32, bitcast=True)
        digit, pieces = pieces_of(bits, SQUARED)
        added: tl.tuple = ()
        for i in tl.static_range(DIGITS):
            part = tl.where(digit == i, pieces[0], 0)
            part = tl.where(digit == i - 1, pieces[1], part)
            if SQUARED:
                part = tl.where(digit == i - 2, pieces[2], part)
            added += (sums[i] + tl.sum(part.to(tl.int64), 1),)
        sums = added
        special = counts_of(bits, SQUARED)
        counted: tl.tuple = ()
        for i in tl.static_range(3):
            counted += (counts[i] + tl.sum(special[i].to(tl.int32), 1),)
        counts = counted
    state = states + tl.program_id(0).to(tl.int64) * STATE
    for i in tl.static_range(DIGITS):
        tl.store(state + i, tl.sum(sums[i], 0))
    for i in tl.static_range(3):
        tl.store(state + DIGITS + i, tl.sum(counts[i].to(tl.int64), 0))


@triton_operator("exact_state")
def triton_exact_state(x: Tensor, squared: bool) -> Tensor:
    """Return int64 [STATE]; digits are sums whose carries are not propagated."""
    if x.numel() > portable.MOST_AT_ONCE:
        raise UnsupportedError(
            expected=f"at most {portable.MOST_AT_ONCE} elements at once",
            received=str(x.numel()),
            remedy="split the tensor, as exact_state_anywhere does: states do not depend on how it is cut",
        )
    tile = tile_of("exact_sum", x.dtype, target_of(x))
    programs = triton.cdiv(x.numel(), tile.size * TILES)
    states = torch.zeros(programs, STATE.value, dtype=torch.int64, device=x.device)
    given = (x.contiguous().reshape(-1), states, x.numel())
    constants = {"SQUARED": squared, "LANES": tile.size // TOGETHER.value, "TILES": TILES}
    run(add_digits, (programs,), *given, warps=tile.warps, **constants)
    return states.sum(0)  # of integers, which have no order
