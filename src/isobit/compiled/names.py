"""Names of expressions: equal names mean equal bits for all inputs.

[Note: names]
A value has a name of 62 bits (uint64). A constant has the flag `CONSTANT` and its own bits, so it
is named by its value. Everything else is a hash of 61 bits of an operation and the names of its
operands; an input is a hash of its label and its index. Two different expressions get the same
hash with probability 2**-61 per compared pair; a run that compares ten million pairs has a
collision with probability below 2**-37. The hash is fixed (no seed), so names can be compared
across processes and written to files. It does not resist an attacker who picks expressions.

Only rules that are exact in every bit, NaN included, are part of a name (NVIDIA's arithmetic
returns one canonical NaN, so operand order does not show in a NaN's payload; PTX ISA, "Floating
Point Comparisons" and the `.f32` notes of add, mul, fma):
  add(a, b) = add(b, a); mul(a, b) = mul(b, a); fma(a, b, c) = fma(b, a, c)
  the products of one fused tensor-core step have no order
  max and min are sets: associative, commutative, idempotent (see `Sets`)
  an operation on constants only, correctly rounded, is the constant that it gives
There is no rule x + 0 = x (it is wrong for -0) and no rule x * 1 = x (it is wrong for a NaN), so a
tensor-core step over products of zeros stays in the name: a kernel that pads with zeros equals
another that pads alike.

[Note: halves]
Registers and memory carry one uint64 per 16-bit half, whose upper two bits are its kind:
  VALUE     a 16-bit value with a name           LOW, HIGH   a half of the 32-bit value with a name
  FIXED     a constant; the lower 16 bits are its value
`join` makes the name of 32 bits from two halves: a value whose halves were never parted keeps its
name, a bf16 above a zero half is its exact widening, anything else is a hash of both halves.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.compiled import arithmetic as ar

Array = npt.NDArray[Any]
Names = npt.NDArray[np.uint64]
U64 = np.uint64

CONSTANT = U64(1 << 61)
HASH = U64((1 << 61) - 1)
NAME = U64((1 << 62) - 1)
VALUE, LOW, HIGH, FIXED = U64(0), U64(1 << 62), U64(2 << 62), U64(3 << 62)
KIND = U64(3 << 62)
SIXTEEN = U64(1 << 32)  # marks the constant of 16 bits; one of 32 bits has no mark
ONE_BIT = U64(2 << 32)  # marks the constant of a predicate

_FIRST, _SECOND = U64(0xBF58476D1CE4E5B9), U64(0xD6E8FEB86659FD93)
_STEP, _START = U64(0x94D049BB133111EB), U64(0x9E3779B97F4A7C15)
_S29, _S32, _S61, _S62 = U64(29), U64(32), U64(61), U64(62)


def mix(*parts: Array | np.uint64, start: np.uint64 = _START) -> Names:
    """Hash parts in their order to 61 bits; arrays broadcast."""
    return np.asarray(hash64(start, parts) & HASH)


def hash64(start: Any, parts: tuple[Array | np.uint64, ...]) -> Any:
    """Hash parts in their order to 64 bits."""
    state = start
    with np.errstate(over="ignore"):
        for part in parts:
            state = state ^ part
            state *= _FIRST  # in place from here on: the first line made a new array
            state += _STEP
            state ^= state >> _S29
            state *= _SECOND
            state ^= state >> _S32
    return state


@functools.cache
def tag(operation: str) -> np.uint64:
    """Return the number that stands for an operation in a hash."""
    digest = hashlib.blake2b(operation.encode(), digest_size=8).digest()
    number: np.uint64 = np.uint64(int.from_bytes(digest, "big"))
    return number


@functools.cache
def start_of(operation: str) -> np.uint64:
    """Return the hash that names of an operation start from."""
    start: np.uint64 = np.uint64(hash64(_START, (tag(operation),)))
    return start


def constant(bits: Any) -> Names:
    """Return the name of a constant of 32 bits (a float by its bits)."""
    return np.asarray(CONSTANT | np.asarray(bits).astype(U64))


def constant_float(value: float) -> np.uint64:
    """Return the name of an fp32 constant.

    Example:
        >>> int(constant_float(0.0)) == int(CONSTANT)
        True
    """
    made: np.uint64 = np.uint64(constant(np.float32(value).view(np.uint32)))
    return made


def constant16(bits: Any) -> Names:
    """Return the name of a constant of 16 bits."""
    return np.asarray(CONSTANT | SIXTEEN | np.asarray(bits).astype(U64))


def constant_predicate(bits: Any) -> Names:
    """Return the name of a predicate that depends on no data."""
    return np.asarray(CONSTANT | ONE_BIT | np.asarray(bits).astype(U64))


def is_constant(name: Array | np.uint64) -> Array:
    """Tell which names are constants."""
    return np.asarray((name >> _S61) & U64(1)).astype(bool)


# ---- operations ---------------------------------------------------------------------------------
Folding = Callable[..., Array]


def make(operation: str, *operands: Array | np.uint64, folded: Array | None = None) -> Names:
    """Return the name of an operation on operands. See [Note: signs] for add, sub, mul, div, fma.

    Args:
        operation: its name, with everything that changes bits (type, rounding, flushing).
        operands: names.
        folded: the bits of the result; where all operands are constants they name the result.
    """
    signed = _SIGNED.get(operation)
    made = signed(*operands) if signed else mix(*operands, start=start_of(operation))
    if folded is not None:
        fixed: Any = functools.reduce(np.bitwise_and, operands) & CONSTANT
        if np.any(fixed):
            made = np.where(np.broadcast_to(fixed != 0, made.shape), constant(folded), made)
    return made


# ---- signs --------------------------------------------------------------------------------------
# [Note: signs]
# Compilers write x - n * c as x + n * (-c) and back, which are the same bits for all inputs. So the
# last bit of a hash stands for a sign: h and h ^ 1 are a value and its negative. A difference is
# the sum with the negative, and the sign of a product or quotient is taken out of its operands.
# Arithmetic returns one NaN, whatever the signs of its operands. The instruction `neg` keeps a name
# of its own, because it may change the sign of a NaN. There is no rule -(a + b) = -a - b: it is
# wrong for sums that are zero.
_MINUS = U64(1 << 31)  # the sign bit of an fp32 constant


def _sign_bit(a: Array | np.uint64) -> Array:
    return np.where(is_constant(a), _MINUS, U64(1))


def _apart(a: Array | np.uint64) -> tuple[Array, Array]:
    """Return a name without its sign, and the sign: 0 or 1."""
    bit = _sign_bit(a)
    return np.asarray(a & ~bit), np.asarray((a & bit) != 0).astype(U64)


def _add(a: Array, b: Array) -> Names:
    return mix(*ordered(a, b), start=start_of("add"))


def _sub(a: Array, b: Array) -> Names:
    return _add(a, b ^ _sign_bit(b))


def _mul(a: Array, b: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(*ordered(a, b), start=start_of("mul")) ^ (minus ^ also)


def _div(a: Array, b: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(a, b, start=start_of("div")) ^ (minus ^ also)


def _fma(a: Array, b: Array, c: Array) -> Names:
    (a, minus), (b, also) = _apart(a), _apart(b)
    return mix(*ordered(a, b), c, minus ^ also, start=start_of("fma"))


_SIGNED: dict[str, Callable[..., Names]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fma": _fma,
}


def ordered(a: Array | np.uint64, b: Array | np.uint64) -> tuple[Array, Array]:
    """Return two operands in the order that a commutative operation is named with."""
    return np.minimum(a, b), np.maximum(a, b)


def _fold(compute: Folding, *operands: Array | np.uint64) -> Array | None:
    if not np.any(functools.reduce(np.bitwise_and, operands) & CONSTANT):
        return None
    values = [np.asarray(each).astype(np.uint32).view(np.float32) for each in operands]
    with np.errstate(all="ignore"):
        return ar.patterns(compute(*values))


def add(a: Names, b: Names) -> Names:
    """Name a + b in fp32."""
    return make("add", *ordered(a, b), folded=_fold(np.add, a, b))


def sub(a: Names, b: Names) -> Names:
    """Name a - b in fp32."""
    return make("sub", a, b, folded=_fold(np.subtract, a, b))


def mul(a: Names, b: Names) -> Names:
    """Name a * b in fp32."""
    return make("mul", *ordered(a, b), folded=_fold(np.multiply, a, b))


def fma(a: Names, b: Names, c: Names) -> Names:
    """Name a * b + c with one rounding in fp32."""
    return make("fma", *ordered(a, b), c, folded=_fold(ar.fma, a, b, c))


def div(a: Names, b: Names) -> Names:
    """Name a / b, correctly rounded in fp32."""
    return make("div", a, b, folded=_fold(np.divide, a, b))


def sqrt(a: Names) -> Names:
    """Name the square root, correctly rounded in fp32."""
    return make("sqrt", a, folded=_fold(np.sqrt, a))


def round_to(dtype: str, a: Names) -> Names:
    """Name the rounding of an fp32 value to "bf16" or "f16" (nearest, ties to even)."""
    made, fixed = make(f"round {dtype}", a), is_constant(a)
    if not fixed.any():
        return made
    bits = np.asarray(a).astype(np.uint32)
    near = ar.round_bf16(bits) if dtype == "bf16" else ar.round_f16(bits.view(np.float32))
    return np.where(fixed, constant16(near), made)


def widen(dtype: str, a: Names) -> Names:
    """Name the exact fp32 value of a "bf16" or "f16" value."""
    made, fixed = make(f"widen {dtype}", a), is_constant(a)
    if not fixed.any():
        return made
    exact = ar.widen(np.asarray(a).astype(np.uint16), dtype).view(np.uint32)
    return np.where(fixed, constant(exact), made)


def select(predicate: Names, a: Names, b: Names) -> Names:
    """Name "a if predicate else b"; a predicate that is a constant chooses now."""
    made = make("select", predicate, a, b)
    known, true = is_constant(predicate), (predicate & U64(1)).astype(bool)
    return np.where(known, np.where(true, a, b), np.where(a == b, a, made))


# ---- halves -------------------------------------------------------------------------------------
def split(name: Names) -> tuple[Names, Names]:
    """Return the lower and the upper half of 32-bit values."""
    low, high = LOW | name, HIGH | name
    fixed = is_constant(name)
    if fixed.any():
        low = np.where(fixed, FIXED | (name & U64(0xFFFF)), low)
        high = np.where(fixed, FIXED | ((name >> U64(16)) & U64(0xFFFF)), high)
    return low, high


def join(low: Names, high: Names) -> Names:
    """Return the names of the 32-bit values that two halves make. See [Note: halves]."""
    whole = (low ^ high) == KIND  # LOW ^ HIGH, and the same name
    whole &= (low & KIND) == LOW
    if whole.all():
        return np.asarray(low & NAME)
    fixed = (low & high) >= FIXED
    made = np.where(whole, low & NAME, make("join", low, high))
    value = constant(((high & U64(0xFFFF)) << U64(16)) | (low & U64(0xFFFF)))
    made = np.where(fixed, value, made)
    bf16 = (low == FIXED) & (high < FIXED)
    return np.where(bf16, widen("bf16", value16(high)), made) if bf16.any() else made


def is_one_value(low: Names, high: Names) -> Array:
    """Tell which pairs of halves are the two halves of one 32-bit value, or a constant."""
    whole = ((low ^ high) == KIND) & ((low & KIND) == LOW)
    return np.asarray(whole | ((low & high) >= FIXED))


def fixed_half(bits: Any) -> Names:
    """Return the half that is a constant."""
    return np.asarray(FIXED | np.asarray(bits).astype(U64))


def half_is_fixed(half: Names) -> Array:
    """Tell which halves are constants."""
    return np.asarray(half >= FIXED)


def value16(half: Names) -> Names:
    """Return the names of 16-bit values from their halves."""
    kind = half & KIND
    if not kind.any():
        return half
    made = np.where(kind == VALUE, half, mix(tag("half"), half))
    return np.where(kind == FIXED, constant16(half & U64(0xFFFF)), made)


def half16(name: Names) -> Names:
    """Return the halves of 16-bit values from their names."""
    fixed = is_constant(name)
    return np.asarray(np.where(fixed, FIXED | (name & U64(0xFFFF)), VALUE | name))


def pair(low: Names, high: Names) -> Names:
    """Return the names of the 64-bit values that two 32-bit values make."""
    return make("pair", low, high)
