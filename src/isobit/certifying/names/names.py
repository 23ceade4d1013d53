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
  x - y is x + (-y), and a sign is taken out of a product (see [Note: signs] in signs.py)
  an operation on constants only, correctly rounded, is the constant that it gives
  m * 1 and m + -0 of a maximum m in a lane of f32x2 are m (see [Note: maxima] in maxima.py)
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
from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names.hashes import CONSTANT as CONSTANT
from isobit.certifying.names.hashes import HASH as HASH
from isobit.certifying.names.hashes import U64, hash_parts, start_of
from isobit.certifying.names.hashes import Array as Array
from isobit.certifying.names.hashes import Names as Names
from isobit.certifying.names.hashes import is_constant as is_constant
from isobit.certifying.names.hashes import mix as mix
from isobit.certifying.names.hashes import ordered as ordered
from isobit.certifying.names.hashes import tag as tag
from isobit.certifying.names.signs import SIGNED

NAME = U64((1 << 62) - 1)
VALUE, LOW, HIGH, FIXED = U64(0), U64(1 << 62), U64(2 << 62), U64(3 << 62)
KIND = U64(3 << 62)
SIXTEEN = U64(1 << 32)  # marks the constant of 16 bits; one of 32 bits has no mark
ONE_BIT = U64(2 << 32)  # marks the constant of a predicate


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


def inputs(label: str, count: int, bits: int) -> Names:
    """Return the halves of a buffer of `count` elements that is an input called `label`.

    Args:
        label: the name of the buffer; equal labels and indices mean the same input.
        count: elements.
        bits: of one element: 8, 16, 32 or 64.

    Returns:
        One uint64 per 16-bit half.
    """
    if bits == 32:
        return np.stack(split(input_names(label, count, bits)), -1).reshape(-1)
    return np.asarray(VALUE | input_names(label, (count * bits + 15) // 16, 16))


def input_names(label: str, count: int, bits: int) -> Names:
    """Return the names of the elements of an input; of 64 bits and 8 bits, of their halves."""
    operation = tag(f"input {label} of {bits} bits")
    return mix(operation, np.arange(count, dtype=U64))


# ---- operations ---------------------------------------------------------------------------------
Folding = Callable[..., Array]


def make(operation: str, *operands: Array | np.uint64, folded: Array | None = None) -> Names:
    """Return the name of an operation on operands. See signs.py for add, sub, mul, div, fma.

    Args:
        operation: its name, with everything that changes bits (type, rounding, flushing).
        operands: names.
        folded: the bits of the result; where all operands are constants they name the result.
    """
    signed = SIGNED.get(operation)
    made = mix(*operands, start=start_of(operation)) if signed is None else signed(*operands)
    if folded is not None:
        fixed: Any = functools.reduce(np.bitwise_and, operands) & CONSTANT
        if np.any(fixed):
            made = np.where(np.broadcast_to(fixed != 0, made.shape), constant(folded), made)
    return made


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


def dot(a: Names, b: Names, c: Names, engine: str, dtype: str) -> Names:
    """Name one fused step of a tensor core: products of a and b over the last axis, and c.

    The products have no order and no side: the name has two sums over k, modulo 2**64, of products
    of hashes. Different sets of products are different polynomials in the hashes, so that both sums
    agree by chance with a probability below 2**-100.
    """
    sums = [np.einsum("...k,...k->...", x, y) for x, y in zip(powers(a), powers(b), strict=True)]
    return make(f"dot {engine} {dtype}", *sums, c)


def dot_tile(a: Names, b: Names, c: Names, engine: str, dtype: str, products: int) -> Names:
    """Name a chain of fused steps: a [..., m, k], b [..., n, k], c [..., m, n]."""
    return dot_chain(powers(a), powers(b), c, f"dot {engine} {dtype}", products)


def dot_chain(
    a: tuple[Names, Names], b: tuple[Names, Names], c: Names, operation: str, products: int
) -> Names:
    """Name a chain of fused steps from the `powers` of its operands."""
    for k in range(0, a[0].shape[-1], products):
        sums = [
            np.einsum("...mk,...nk->...mn", x[..., k : k + products], y[..., k : k + products])
            for x, y in zip(a, b, strict=True)
        ]
        c = make(operation, *sums, c)
    return c


def powers(name: Names) -> tuple[Names, Names]:
    """Return two hashes of 64 bits of names, for the products of `dot`."""
    with np.errstate(over="ignore"):
        first = np.asarray(hash_parts(start_of("product"), (name,)))
        second = (first ^ (first >> U64(31))) * U64(0x9FB21C651E98DF25)
        return first, second ^ (second >> U64(29))


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


# Names of bytes: parts of a 16-bit half. See [Note: halves] in names.py.

# half made of two bytes -> its bytes. Forgotten when it grows: then a byte of the half gets a name
# of its own, which is sound (equal names stay equal values) but may tell equal values apart.
_BYTES: dict[int, tuple[int, int]] = {}
BYTES_KEPT = 1 << 20


def byte_of(half: Names, which: int) -> Names:
    """Return the names of the lower (0) or the upper (1) bytes of halves.

    A byte of a constant is a constant of 16 bits.
    """
    half = np.asarray(half)
    made = np.where(
        half >= FIXED,
        constant16((half >> np.uint64(8 * which)) & np.uint64(0xFF)),
        make("byte", half, np.uint64(which)),
    )
    if _BYTES:
        for at in np.flatnonzero([int(each) in _BYTES for each in half.reshape(-1)]):
            made.reshape(-1)[at] = _BYTES[int(half.reshape(-1)[at])][which]
    return np.asarray(made)


def half_of_bytes(low: Names, high: Names) -> Names:
    """Return the halves that two bytes make."""
    fixed = is_constant(low & high)
    value = ((high & np.uint64(0xFF)) << np.uint64(8)) | (low & np.uint64(0xFF))
    made = np.where(fixed, FIXED | value, VALUE | make("bytes", low, high))
    if len(_BYTES) > BYTES_KEPT:
        _BYTES.clear()
    flat = zip(made.reshape(-1), low.reshape(-1), high.reshape(-1), strict=True)
    for half, first, second in flat:
        if half < FIXED:
            _BYTES[int(half)] = (int(first), int(second))
    return np.asarray(made)
