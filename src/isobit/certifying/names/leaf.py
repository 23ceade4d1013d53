"""The tensor-core engines over numpy arrays: bit for bit what isobit.order.engines defines, fast enough for tiles.

[Note: why float64 is exact here]
A product of two operands has at most 22 significant bits, and an aligned term at most F + 3; 33 of them fit in 53 bits.
All exponents stay far inside those of float64, so every multiplication by a power of two, every truncation and every
sum below is exact, in any order. Infinities and NaN follow by themselves. Subnormals of fp32 are read and written by
integer operations, so that a thread that flushes them (torch.set_flush_denormal) gets the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.certifying.names.arithmetic import odd_sum
from isobit.errors import ArgumentError, UnsupportedError
from isobit.order.engines import (
    CDNA3_SUM_FRACTION,
    ENGINE_OF_TARGET,
    LEAST_EXPONENT,
    LEAST_FP32,
    TENSOR_CORES,
    TensorCore,
)

Array = npt.NDArray[Any]
NAN = 0x7FFFFFFF  # every NaN that a matrix instruction returns
NO_EXPONENT = -8192  # of a zero: below every other
# exponent bits, fraction bits, low bits of the raw pattern that the hardware ignores
FORMATS = {
    "bf16": (8, 7, 0),
    "f16": (5, 10, 0),
    "tf32": (8, 10, 13),
    "e4m3": (4, 3, 0),
    "e5m2": (5, 2, 0),
}
# 8-bit operands have engines of their own: Hopper and Blackwell share one for 16-bit operands, not for these.
EIGHT_BIT_ENGINE_OF_TARGET = {
    "sm_89": "tc13x16",
    "sm_90": "tc13x32",
    "sm_100": "tc25x32",
    "sm_120": "tc25x32",
}
# Temporaries of about this many elements stay in a core's cache.
BLOCK = 1 << 16


def multiply_accumulate(
    a: Array, b: Array, c: Array, engine: str, dtype: str, dtype_b: str | None = None
) -> Array:
    """Return a @ b.T + c as a chain of the engine's steps along K.

    Args:
        a: Raw patterns [..., M, K]: uint16 for bf16 and f16, uint32 for tf32 (a float32 whose low 13 bits
            are ignored), uint8 for e4m3 and e5m2.
        b: Raw patterns [..., N, K].
        c: The accumulator, float32 [..., M, N].
        engine: A name of `isobit.order.engines.TENSOR_CORES`.
        dtype: The operand type of a, and of b if `dtype_b` is not given.
        dtype_b: The operand type of b.

    Returns:
        float32 [..., M, N]; every NaN has the bits 0x7FFFFFFF.

    Raises:
        UnsupportedError: The engine has no rule for these operand types.
        ArgumentError: Shapes do not fit, or c is not float32.
    """
    rule = rule_of(engine, dtype)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2])
    if a.shape[-1] != b.shape[-1] or c.shape != shape or c.dtype != np.float32:
        raise ArgumentError(
            expected="a [..., M, K], b [..., N, K], c [..., M, N] in float32",
            received=f"a {list(a.shape)}, b {list(b.shape)}, c {list(c.shape)} in {c.dtype}",
            remedy="pass b with K last, and the accumulator of the whole tile",
        )
    if rule_of(engine, dtype_b or dtype) != rule:
        raise no_rule(engine, f"{dtype} with {dtype_b}")
    a_values, a_exponents = decode(a, dtype)
    b_values, b_exponents = decode(b, dtype_b or dtype)
    rows = max(1, BLOCK // (rule.products * max(1, b.shape[-2])))
    with np.errstate(all="ignore"):
        total = widen(c)
        for at in range(0, a.shape[-2], rows):
            part = total[..., at : at + rows, :]
            for k in range(0, a.shape[-1], rule.products):
                run = slice(k, k + rule.products)
                part = step(
                    rule,
                    a_values[run, ..., at : at + rows, None] * b_values[run, ..., None, :],
                    a_exponents[run, ..., at : at + rows, None] + b_exponents[run, ..., None, :],
                    part,
                )
            total[..., at : at + rows, :] = part
        return narrow(total)


def fused_sum(a: Array, b: Array, c: Array, engine: str, dtype: str) -> Array:
    """Return the sums of a [..., K] times b [..., K] and c [...], each a chain of the engine's steps."""
    return multiply_accumulate(a[..., None, :], b[..., None, :], c[..., None, None], engine, dtype)[
        ..., 0, 0
    ]


def engine_of(target: str, dtype: str) -> str:
    """Return the engine of a target for an operand type.

    Raises:
        UnsupportedError: The arithmetic of the target is not known for that type.
    """
    engines = EIGHT_BIT_ENGINE_OF_TARGET if dtype in ("e4m3", "e5m2") else ENGINE_OF_TARGET
    if target not in engines:
        raise UnsupportedError(
            expected=f"one of {', '.join(engines)}, whose arithmetic of {dtype} is known",
            received=target,
            remedy="compile for one of these targets, or use operands of another type",
        )
    rule_of(engines[target], dtype)
    return engines[target]


def rule_of(engine: str, dtype: str) -> TensorCore:
    """Return the constants of an engine for an operand type."""
    rule = TENSOR_CORES.get(engine, {}).get(dtype)
    if rule is None:
        raise no_rule(engine, dtype)
    return rule


def no_rule(engine: str, dtype: str) -> UnsupportedError:
    covered = ", ".join(f"{name} ({' '.join(types)})" for name, types in TENSOR_CORES.items())
    return UnsupportedError(
        expected=f"an engine and operand type with known arithmetic: {covered}",
        received=f"engine {engine}, operand type {dtype}",
        remedy="use one of these, or compile for a target that has them",
    )


def step(rule: TensorCore, products: Array, exponents: Array, total: Array) -> Array:
    """Add one step of products [L, ...] to the accumulator [...], all float64; `products` is overwritten."""
    if rule.late_accumulator:
        return cdna3_step(rule, products, exponents, total)
    top: Array = np.maximum(exponents.max(0), exponent_fields(total))
    if top.min(initial=0) < LEAST_FP32:
        np.maximum(top, np.where(total == 0, rule.zero, LEAST_FP32), out=top)
    scale = powers(rule.fraction - top)
    products *= scale
    np.trunc(products, out=products)
    aligned: Array = np.trunc(total * scale)
    aligned += products.sum(0)
    aligned += 0.0  # no -0
    aligned *= powers(top - rule.fraction)
    if top.min(initial=0) >= LEAST_FP32 + rule.fraction and top.max(initial=0) < 120:
        # No sum is subnormal, none is beyond fp32; cutting bits keeps infinities and NaN.
        bits = aligned.view(np.int64)
        bits &= -1 << (52 - rule.result)
        return aligned
    return cut(aligned, rule.result)


def cdna3_step(rule: TensorCore, products: Array, exponents: Array, total: Array) -> Array:
    """Add one step of CDNA3: products first, then the accumulator; bits below are cut by rounding down."""
    too_large = np.abs(products) >= 2.0**128
    if too_large.any():
        products[too_large] *= np.inf
    low = np.maximum(exponents.max(0).astype(np.int64), -300)
    products *= powers(rule.fraction - low)
    np.trunc(products, out=products)
    dot = products.sum(0)
    top = np.maximum(low, exponents_of(total))
    unit = CDNA3_SUM_FRACTION + 1
    dot = np.floor(dot * powers(low - top + (unit - rule.fraction)))
    held = np.floor(total * powers(rule.fraction - top)) * 2.0 ** (unit - rule.fraction)
    value = (dot + held) * powers(top - unit)
    own = exponents_of(value)
    value = np.floor(value * powers(CDNA3_SUM_FRACTION - own)) * powers(own - CDNA3_SUM_FRACTION)
    return nearest(value)


def powers(exponents: Array) -> Array:
    """Return 2.0**exponents for int64 exponents of normal float64."""
    return (exponents + 1023 << 52).view(np.float64)


def exponent_fields(values: Array) -> Array:
    """Return the exponents of float64 as int64; -1023 of a zero, 1024 of what is not finite."""
    found = values.view(np.int64) >> 52
    found &= 0x7FF
    found -= 1023
    return found


def exponents_of(values: Array) -> Array:
    """Return the exponents of fp32 values in float64, at least that of a subnormal."""
    return np.clip(exponent_fields(values), LEAST_FP32, 300)


def cut(values: Array, fraction: int) -> Array:
    """Round float64 toward zero to the range of fp32 and a number of fractional bits; a zero is +0."""
    drop = np.maximum(LEAST_FP32 - exponent_fields(values), 0) + (52 - fraction)
    places = np.minimum(drop, 63)
    kept = np.where(drop > 52, 0, values.view(np.int64) >> places << places)
    result = kept.view(np.float64)
    too_large = np.abs(result) >= 2.0**128
    if too_large.any():
        result[too_large] *= np.inf
    return result


def nearest(values: Array) -> Array:
    """Round float64 to fp32, ties to even, and return it in float64."""
    bits = values.view(np.int64)
    rounded = (bits + ((1 << 28) - 1) + ((bits >> 29) & 1)) >> 29 << 29
    result = np.where(np.isnan(values), np.nan, rounded.view(np.float64))
    small = np.abs(values) < 2.0**-126
    if small.any():
        result[small] = np.rint(values[small] * 2.0**149) * 2.0**-149
    too_large = np.abs(result) >= 2.0**128
    if too_large.any():
        result[too_large] *= np.inf
    return result


def widen(c: Array) -> Array:
    """Return fp32 as float64, contiguous."""
    wide = np.array(c, np.float64, order="C")
    bits = np.ascontiguousarray(c).view(np.uint32)
    small = (bits << 1) - 1 < 0xFFFFFF  # of a zero this wraps around
    if small.any():
        size = (bits[small] & 0x7FFFFF) * 2.0**-149
        wide[small] = np.where(bits[small] >> 31, -size, size)
    return wide


def narrow(values: Array) -> Array:
    """Return float64 that holds fp32 values as fp32; every NaN becomes 0x7FFFFFFF."""
    found = values.astype(np.float32)
    # neither a normal number nor a zero
    odd = (exponent_fields(values) + 126).view(np.uint64) > 126 + 127
    odd &= values != 0
    if odd.any():
        bits, rest = found.view(np.uint32), values[odd]
        sign = np.where(np.signbit(rest), 0x80000000, 0)
        size = np.where(np.isfinite(rest), np.abs(rest), 0.0) * 2.0**149  # of a subnormal
        size = np.where(np.isinf(rest), 0x7F800000, size).astype(np.int64)
        bits[odd] = np.where(np.isnan(rest), NAN, sign | size)
    return found


def decode(raw: Array, dtype: str) -> tuple[Array, Array]:
    """Return the values (float64) and exponents (int16) of raw patterns [..., rows, K], as [K, ..., rows]."""
    exponent, fraction, ignored = FORMATS[dtype]
    width = 1 + exponent + fraction + ignored
    if raw.dtype != np.dtype(f"uint{width}"):
        raise UnsupportedError(
            expected=f"raw patterns of {dtype} as uint{width}",
            received=str(raw.dtype),
            remedy=f"view the array as numpy.uint{width}",
        )
    values, exponents = tables(dtype)
    index = np.ascontiguousarray(np.moveaxis(raw, -1, 0))
    if ignored:
        index = index >> ignored
    return values.take(index), exponents.take(index)


@cache
def tables(dtype: str) -> tuple[Array, Array]:
    """Return the value and the exponent of every pattern of a type."""
    width, digits, _ = FORMATS[dtype]
    least = LEAST_EXPONENT[dtype]
    patterns = np.arange(1 << (1 + width + digits))
    field = (patterns >> digits) & ((1 << width) - 1)
    fraction = patterns & ((1 << digits) - 1)
    exponents = np.maximum(field, 1) - 1 + least
    values = np.ldexp(fraction + np.where(field, 1 << digits, 0).astype(float), exponents - digits)
    last = field == (1 << width) - 1
    if dtype == "e4m3":  # no infinity; only the last pattern is NaN
        values[last & (fraction == (1 << digits) - 1)] = np.nan
    else:
        values[last] = np.where(fraction[last] == 0, np.inf, np.nan)
    values = np.where(patterns >> (width + digits), -values, values)
    exponents[values == 0] = NO_EXPONENT
    return values, exponents.astype(np.int16)


# The chain of fused multiply-adds that `tl.dot` in fp32 is on every GPU (`input_precision="ieee"`).


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once, for float32 arrays that broadcast; a NaN has the bits 0x7FFFFFFF.

    Subnormals are kept also in a thread that flushes them.
    """
    with np.errstate(all="ignore"):
        return narrow(nearest(odd_sum(widen(a) * widen(b), widen(c))))


def chain(a: Array, b: Array, c: Array) -> Array:
    """Return a @ b.T + c for a [..., M, K], b [..., N, K], c [..., M, N]: k ascending, on top of c."""
    with np.errstate(all="ignore"):
        left, right, total = widen(a), widen(b), widen(c)
        for k in range(a.shape[-1]):
            total = nearest(odd_sum(left[..., :, None, k] * right[..., None, :, k], total))
        return narrow(total)
