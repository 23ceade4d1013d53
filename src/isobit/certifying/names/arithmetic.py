"""Float arithmetic that numpy does not have: fused multiply-add, roundings, flushing, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

CANONICAL_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}


def canonical(bits: Array, kind: str = "f32") -> Array:
    """Return the bits with every NaN replaced by the one that NVIDIA's arithmetic returns."""
    if kind == "f32":
        nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    else:
        top = 0x7C00 if kind == "f16" else 0x7F80
        nan = (bits & np.uint16(0x7FFF)) > np.uint16(top)
    return np.where(nan, bits.dtype.type(CANONICAL_NAN[kind]), bits) if nan.any() else bits


def flush(values: Array) -> Array:
    """Return fp32 values with subnormals replaced by zeros of the same sign (`.ftz`)."""
    small = np.abs(values) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), values), values)


def odd_sum(product: Array, c: Array) -> Array:
    """Return product + c in fp64, made odd where it was not exact.

    A value that is rounded to odd with at least two bits more can be rounded again to nearest as
    if it had been rounded once (Boldo and Melquiond 2008).
    """
    total = product + c
    there = total - product
    dropped = (product - (total - there)) + (c - there)
    even = (total.view(np.int64) & 1) == 0
    odd = np.isfinite(total) & (dropped != 0) & even & np.isfinite(dropped)
    toward = np.where(dropped > 0, np.inf, -np.inf)
    return np.where(odd, np.nextafter(total, toward), total)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c for fp32 with one rounding."""
    wide = odd_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    return wide.astype(np.float32)


def narrow_odd(wide: Array) -> Array:
    """Return fp64 values rounded to odd in fp32."""
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    inexact = np.isfinite(near) & (back != wide)
    even = (near.view(np.uint32) & 1) == 0
    toward = np.where(wide > back, np.float32(np.inf), np.float32(-np.inf))
    # nearest gave the even neighbour of an inexact value: the odd one is on the other side
    return np.where(inexact & even, np.nextafter(near, toward), near)


def round_bf16(bits: Array) -> Array:
    """Return bf16 bits (uint16) of fp32 bits, to nearest, ties to even; NaN is canonical."""
    wide = bits.astype(np.uint64)
    near = ((wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(
        np.uint16
    )
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.asarray(np.where(nan, np.uint16(0x7FFF), near))


def round_f16(values: Array) -> Array:
    """Return fp16 bits (uint16) of fp32 or fp64 values, to nearest, ties to even; too large a value is infinite."""
    with np.errstate(over="ignore"):
        near: Array = values.astype(np.float16).view(np.uint16)
    return canonical(near, "f16")


def widen(bits: Array, kind: str) -> Array:
    """Return the fp32 values of 16-bit patterns."""
    if kind == "bf16":
        made: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return made
    return np.asarray(bits.view(np.float16).astype(np.float32))


def floats(bits: Array) -> Array:
    """Return the fp32 values of 32-bit patterns."""
    values: Array = np.ascontiguousarray(bits).view(np.float32)
    return values


def patterns(values: Any) -> Array:
    """Return the 32-bit patterns of fp32 values; every NaN is canonical."""
    return canonical(np.ascontiguousarray(values, dtype=np.float32).view(np.uint32))
