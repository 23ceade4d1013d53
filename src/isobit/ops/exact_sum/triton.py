"""The Triton executor of the exact sum: integers only, so that the order of addition has no meaning.

[Note: digits on a GPU]
A finite fp32 value is a whole number of 2^-149. Its 24 bits, shifted to their place, fall into two neighbouring of
DIGITS digits of 32 bits. The digits of all values are added as int64, first per program and then over all programs,
which 2^31 values cannot overflow; carries are propagated once, at the end, and the magnitude is rounded to 24 bits.
After the digits come the numbers of NaN, +inf and -inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of

DIGITS = tl.constexpr(9)
STATE = tl.constexpr(16)  # digits, three counts, and zeros
MOST = 2**31  # values of one sum
GROUP = 256  # states that one program adds


@triton.jit(do_not_specialize=["size"])
def add_values(x: tl.tensor, states: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Store the digits of the sum of BLOCK values in states [programs, STATE]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    finite = exponent < 0xFF
    fraction = bits & 0x7FFFFF
    whole = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
    shift = tl.maximum(exponent, 1) - 1  # the value is whole · 2^(shift - 149)
    digit = shift // 32
    placed = tl.where(finite, whole << (shift % 32).to(tl.int64), 0)
    sign = tl.where(bits < 0, -1, 1).to(tl.int64)
    low, high = (placed & 0xFFFFFFFF) * sign, (placed >> 32) * sign
    state = states + tl.program_id(0).to(tl.int64) * STATE
    for i in tl.static_range(DIGITS):
        part = tl.where(digit == i, low, 0) + tl.where(digit == i - 1, high, 0)
        tl.store(state + i, tl.sum(part))
    infinite = (exponent == 0xFF) & (fraction == 0)
    tl.store(state + DIGITS, tl.sum(((exponent == 0xFF) & (fraction != 0)).to(tl.int64)))
    tl.store(state + DIGITS + 1, tl.sum((infinite & (bits > 0)).to(tl.int64)))
    tl.store(state + DIGITS + 2, tl.sum((infinite & (bits < 0)).to(tl.int64)))


@triton.jit(do_not_specialize=["count"])
def add_states(states: tl.tensor, out: tl.tensor, count: tl.tensor, GROUP: tl.constexpr) -> None:
    """Store the sums of GROUP neighbouring states [count, STATE] in out [programs, STATE]."""
    at = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    for i in tl.static_range(DIGITS + 3):
        part = tl.load(states + at * STATE + i, mask=at < count, other=0)
        tl.store(out + tl.program_id(0).to(tl.int64) * STATE + i, tl.sum(part))


@triton.jit
def bit_length(x: tl.tensor) -> tl.tensor:
    """Return the number of bits of x < 2^32."""
    length = (x > 0).to(tl.int64)
    for step in tl.static_range(5):
        large = x >= (1 << (16 >> step))
        length += tl.where(large, 16 >> step, 0)
        x = tl.where(large, x >> (16 >> step), x)
    return length


@triton.jit
def next_digit(
    state: tl.tensor, carry: tl.tensor, plus: tl.tensor, negative: tl.tensor, AT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a digit of the magnitude, and both carries: a negative number's magnitude is its complement plus 1."""
    if AT < DIGITS:
        carry = carry + tl.load(state + AT)
    digit = carry & 0xFFFFFFFF
    digit = tl.where(negative, digit ^ 0xFFFFFFFF, digit) + plus
    return digit & 0xFFFFFFFF, carry >> 32, digit >> 32


@triton.jit
def round_state(state: tl.tensor, out: tl.tensor) -> None:
    """Round the number that a state [STATE] holds to fp32, to nearest, ties to even."""
    zero = tl.load(state) * 0
    carry = zero
    for i in tl.static_range(DIGITS):
        carry = (tl.load(state + i) + carry) >> 32
    negative = carry < 0
    carry, plus, length = zero, negative.to(tl.int64), zero
    for i in tl.static_range(DIGITS + 1):
        digit, carry, plus = next_digit(state, carry, plus, negative, i)
        length = tl.where(digit != 0, 32 * i + bit_length(digit), length)
    shift = tl.maximum(length - 24, 0)  # bits below the last one that is kept
    carry, plus = zero, negative.to(tl.int64)
    kept, half, lost = zero, zero, zero
    for i in tl.static_range(DIGITS + 1):
        digit, carry, plus = next_digit(state, carry, plus, negative, i)
        up = tl.minimum(tl.maximum(32 * i - shift, 0), 31)
        down = tl.minimum(tl.maximum(shift - 32 * i, 0), 32)
        kept = kept | ((digit >> down) << up)
        below = shift - 1 - 32 * i  # the place of the highest lost bit
        part = (digit >> tl.minimum(tl.maximum(below, 0), 32)) & 1
        half = half | tl.where(below >= 0, part, 0)
        count = tl.minimum(tl.maximum(below, 0), 32)
        lost = lost | (digit & ((zero + 1 << count) - 1))
    kept += tl.where((lost != 0) | ((kept & 1) != 0), half, 0)
    bits = tl.minimum((shift << 23) + kept, 0x7F800000)
    bits = tl.where(negative, bits | 0x80000000, bits)
    nans, above = tl.load(state + DIGITS), tl.load(state + DIGITS + 1)
    under = tl.load(state + DIGITS + 2)
    bits = tl.where(above > 0, 0x7F800000, bits)
    bits = tl.where(under > 0, 0xFF800000, bits)
    bits = tl.where((nans > 0) | ((above > 0) & (under > 0)), 0x7FC00000, bits)
    tl.store(out, bits.to(tl.int32).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["size"])
def repeat_grad(grad: tl.tensor, dx: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Store the gradient of the sum, rounded, in all size elements of dx."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(grad + at * 0)
    tl.store(dx + at, round_once(value, dx.dtype.element_ty), mask=at < size)


@triton_operator("exact_sum")
def triton_exact_sum(x: Tensor) -> Tensor:
    if x.numel() >= MOST:
        raise UnsupportedError(
            expected=f"fewer than {MOST} elements on a GPU",
            received=str(x.numel()),
            remedy="sum parts of the tensor on the CPU, or one by one",
        )
    out = torch.empty((), dtype=torch.float32, device=x.device)
    tile = tile_of("exact_sum", x.dtype, target_of(x))
    programs = max(triton.cdiv(x.numel(), tile.size), 1)
    states = torch.zeros(programs, STATE.value, dtype=torch.int64, device=x.device)
    given = (x.contiguous().reshape(-1), states, x.numel())
    if x.numel():
        run(add_values, (programs,), *given, warps=tile.warps, BLOCK=tile.size)
    while len(states) > 1:
        programs = triton.cdiv(len(states), GROUP)
        sums = torch.zeros(programs, STATE.value, dtype=torch.int64, device=x.device)
        run(add_states, (programs,), states, sums, len(states), warps=4, GROUP=GROUP)
        states = sums
    run(round_state, (1,), states, out, warps=1)
    return out


@triton_operator("exact_sum_backward")
def triton_exact_sum_backward(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return dx: every element has the gradient of the sum, rounded once."""
    dx = torch.empty(tuple(shape), dtype=dtype, device=grad.device)
    tile = tile_of("exact_sum_backward", dtype, target_of(grad))
    given = (grad.contiguous(), dx, dx.numel())
    programs = triton.cdiv(dx.numel(), tile.size)
    run(repeat_grad, (programs,), *given, warps=tile.warps, BLOCK=tile.size)
    return dx
