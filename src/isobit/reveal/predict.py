"""Predict a sum: compute it in a revealed order with its revealed arithmetic, in plain Python."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from isobit.order.addition import Step
from isobit.order.evaluate import flush
from isobit.order.exact_sum import exact_sum, round_fp32
from isobit.reveal.arithmetic import Arithmetic

# The smallest normal exponent of each width, and the largest number.
LOWEST = {8: -126, 11: -14, 24: -126, 53: -1022}
LARGEST = {8: (2 - 2.0**-7) * 2.0**127, 11: 65504.0}
BITS = struct.Struct("<q")
DOUBLE = struct.Struct("<d")


def round_to(value: float, bits: int) -> float:
    """Round an fp64 number to so many significand bits: ties to even, subnormals kept, overflow to infinity."""
    if bits == 24:
        return round_fp32(value)
    if bits == 53 or not math.isfinite(value):
        return value
    quantum = _quantum(value, bits)
    near = math.ldexp(round(math.ldexp(value, -quantum)), quantum)
    return math.copysign(near if abs(near) <= LARGEST[bits] else math.inf, value)


def is_near_tie(value: float, bits: int) -> bool:
    """Return whether a rounding to so many bits could go the other way if a divisor were off by 2^-14.

    Stock's bf16 attention divides by a sum of approximate exponentials, which is off by 2^-15 at equal weights.
    """
    if not math.isfinite(value) or bits >= 24:
        return False
    fraction, _ = math.modf(math.ldexp(abs(value), -_quantum(value, bits)))
    return abs(fraction - 0.5) < 2.0**-5


def cut(value: float, bits: int, how: str) -> float:
    """Round a fp32 number to fewer significand bits; a subnormal loses the same bits of its encoding."""
    quantum = _quantum(value, bits, LOWEST[24])
    scaled = math.ldexp(value, -quantum)
    near = math.trunc(scaled) if how.startswith("truncated") else round(scaled)
    return math.copysign(math.ldexp(near, quantum), value)


def _quantum(value: float, bits: int, lowest: int | None = None) -> int:
    """Return the exponent of the last place that is kept."""
    _, exponent = math.frexp(value)
    return max(exponent - 1, LOWEST[bits] if lowest is None else lowest) - bits + 1


def add_two_to_odd(a: float, b: float) -> float:
    """Return the sum in fp64 with its last bit set if inexact: a later rounding to fewer bits is then correct."""
    total = a + b
    there = total - a
    dropped = (a - (total - there)) + (b - there)
    return _make_odd(total, dropped) if dropped else total


def add_to_odd(operands: Sequence[float]) -> float:
    """Return `add_two_to_odd` of any number of operands."""
    if len(operands) == 2:
        return add_two_to_odd(*operands)
    total = exact_sum(operands)
    dropped = exact_sum([*operands, -total]) if math.isfinite(total) else 0.0
    return _make_odd(total, dropped) if dropped else total


def _make_odd(total: float, dropped: float) -> float:
    if not math.isfinite(total) or BITS.unpack(DOUBLE.pack(total))[0] & 1:
        return total
    return math.nextafter(total, math.copysign(math.inf, dropped))


# How an addition is computed: in fp64 and rounded; with the bits that fp64 drops; by `Plan.add`.
PLAIN, TO_ODD, OTHER = range(3)


class Plan:
    """The additions of one tree with its arithmetic, prepared for speed."""

    def __init__(self, steps: Sequence[Step], arithmetic: Arithmetic) -> None:
        """Choose how each addition is computed."""
        self.steps, self.arithmetic = steps, arithmetic
        widths = arithmetic.widths
        unrounded = arithmetic.products not in ("none", "rounded")

        def wide(child: int) -> bool:
            """Whether an operand may have more bits than fp32 holds."""
            return (
                widths[child] == 53
                if child >= 0
                else unrounded and ~child not in arithmetic.rounded
            )

        self.wide_sums = [any(c >= 0 and widths[c] == 53 for c in step) for step in steps]
        self.ways = [
            OTHER
            if width != 24 or len(step) != 2
            else PLAIN
            if not any(wide(child) for child in step)
            else OTHER
            if sums or arithmetic.passing
            else TO_ODD
            for step, width, sums in zip(steps, widths, self.wide_sums, strict=True)
        ]

    def add(self, at: int, operands: Sequence[float]) -> float:
        """Compute one addition that is not plain; `passing` decides how often it rounds."""
        width, passing = self.arithmetic.widths[at], self.arithmetic.passing
        if width == 53:
            return operands[0] + operands[1] if len(operands) == 2 else exact_sum(operands)
        pair = len(operands) == 2
        if passing == "through fp64" or (pair and self.wide_sums[at] and passing != "at once"):
            return round_to(exact_sum(operands) if not pair else operands[0] + operands[1], width)
        total = add_to_odd(operands)
        if pair and width < 24 and passing != "at once":
            total = round_fp32(total)
        return round_to(total, width)

    def sum(self, values: Sequence[float], factors: Sequence[float]) -> float:
        """Return the sum as the last addition leaves it; values and factors are finite."""
        terms = _entering(self.arithmetic, values, factors)
        keeps = self.arithmetic.keeps_subnormal_sums is not False
        sums: list[float] = []
        for at, (step, way) in enumerate(zip(self.steps, self.ways, strict=True)):
            if way == OTHER:
                total = self.add(
                    at, [terms[~child] if child < 0 else sums[child] for child in step]
                )
            else:
                left, right = step
                a = terms[~left] if left < 0 else sums[left]
                b = terms[~right] if right < 0 else sums[right]
                total = round_fp32(a + b if way == PLAIN else add_two_to_odd(a, b))
            sums.append(total if keeps else flush(total))
        return sums[-1]


def replay(
    steps: Sequence[Step],
    arithmetic: Arithmetic,
    values: Sequence[float],
    factors: Sequence[float],
    output_bits: int,
) -> float:
    """Return the sum, rounded to the output; values and factors are finite."""
    return round_to(Plan(steps, arithmetic).sum(values, factors), output_bits)


def _entering(
    arithmetic: Arithmetic, values: Sequence[float], factors: Sequence[float]
) -> list[float]:
    """Return the terms as they enter additions: cut, flushed, multiplied. fp64 holds fp32 products exactly."""
    terms, others = list(values), list(factors)
    if arithmetic.terms_cut_to is not None:
        terms = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in terms]
        if "factors" in arithmetic.cut_how:
            others = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in others]
    if arithmetic.keeps_subnormal_terms is False:
        terms, others = [flush(v) for v in terms], [flush(v) for v in others]
    if arithmetic.products == "none":
        return terms
    terms = [a * b for a, b in zip(terms, others, strict=True)]
    for at in arithmetic.rounded:
        terms[at] = round_fp32(terms[at])
        if arithmetic.keeps_subnormal_sums is False:
            terms[at] = flush(terms[at])
    return terms
