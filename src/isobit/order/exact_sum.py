"""The correctly rounded sum of Python floats: exact, so that it has no order."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from fractions import Fraction

_pack_fp32, _unpack_fp32 = struct.Struct("<f").pack, struct.Struct("<f").unpack


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum rounded once to fp64, whatever the order of the values."""
    known = list(values)
    if any(math.isnan(v) for v in known):
        return math.nan
    infinite = {v for v in known if math.isinf(v)}
    if infinite:
        return infinite.pop() if len(infinite) == 1 else math.nan
    return _sum_finite(known) + 0.0  # -0.0 becomes +0.0


def exact_sum_fp32(values: Iterable[float]) -> float:
    """Return the sum rounded once to fp32, and not first to fp64."""
    known = list(values)
    total = exact_sum(known)
    if not math.isfinite(total):
        return total
    # The fp64 sum is rounded to nearest; what that dropped matters only if the result is a tie of fp32.
    dropped = exact_sum([*known, -total])
    if dropped and _is_fp32_tie(total):
        total = math.nextafter(total, math.copysign(math.inf, dropped))
    return round_fp32(total)


def round_fp32(value: float) -> float:
    """Round fp64 to fp32, ties to even, overflow to infinity."""
    try:
        return _unpack_fp32(_pack_fp32(value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value)


def _sum_finite(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:  # partial sums out of range: use rational numbers, slowly
        total = sum(map(Fraction, values), Fraction(0))
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


def _is_fp32_tie(value: float) -> bool:
    near = round_fp32(value)
    if near == value or not math.isfinite(near):
        return abs(value) == float.fromhex("0x1.ffffffp+127")
    (bits,) = struct.unpack("<i", struct.pack("<f", near))
    step = 1 if (value > near) == (value > 0) else -1
    other = float(struct.unpack("<f", struct.pack("<i", bits + step))[0])
    return abs(value - near) == abs(other - value)
