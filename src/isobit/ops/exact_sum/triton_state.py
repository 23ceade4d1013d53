"""The digits of an exact sum, or of an exact sum of squares, on a GPU; a state of the CPU's form.

See [Note: digits on a GPU] in triton.py. Digit i counts 2^(32 i - 320), so that the square of the least fp32 value has
its place; a square has 48 bits, which are placed as two halves.
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


@triton.jit
def digit_of(part: tl.tensor, place: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """Return what a part of 24 bits, shifted left by `place`, has in digit AT."""
    placed = part << (place % 32).to(tl.int64)
    low = tl.where(place // 32 == AT, placed & 0xFFFFFFFF, 0)
    return low + tl.where(place // 32 == AT - 1, placed >> 32, 0)


@triton.jit(do_not_specialize=["size"])
def add_digits(
    x: tl.tensor, states: tl.tensor, size: tl.tensor, SQUARED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store the digits of the sum of BLOCK values, or of their squares, in states [programs, STATE]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    whole = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
    whole = tl.where(exponent < 0xFF, whole, 0)
    shift = tl.maximum(exponent, 1) - 1  # the value is whole · 2^(shift - 149)
    sign = tl.where(bits < 0, -1, 1).to(tl.int64)
    high, place = whole * 0, shift + 171
    if SQUARED:
        whole = whole * whole
        whole, high, place = whole & 0xFFFFFF, whole >> 24, 2 * shift + 22
        sign = sign * sign
    state = states + tl.program_id(0).to(tl.int64) * STATE
    for i in tl.static_range(DIGITS):
        part = digit_of(whole, place, i)
        if SQUARED:
            part += digit_of(high, place + 24, i)
        tl.store(state + i, tl.sum(part * sign))
    infinite = (exponent == 0xFF) & (fraction == 0)
    tl.store(state + DIGITS, tl.sum(((exponent == 0xFF) & (fraction != 0)).to(tl.int64)))
    tl.store(state + DIGITS + 1, tl.sum((infinite & (sign > 0)).to(tl.int64)))
    tl.store(state + DIGITS + 2, tl.sum((infinite & (sign < 0)).to(tl.int64)))


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
    programs = triton.cdiv(x.numel(), tile.size)
    states = torch.zeros(programs, STATE.value, dtype=torch.int64, device=x.device)
    given = (x.contiguous().reshape(-1), states, x.numel())
    run(add_digits, (programs,), *given, warps=tile.warps, SQUARED=squared, BLOCK=tile.size)
    return states.sum(0)  # of integers, which have no order
