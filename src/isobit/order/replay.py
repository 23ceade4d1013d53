"""Carries out a revealed order with its revealed arithmetic on given values, to hold against what the target gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from isobit.order.addition import Step
from isobit.order.arithmetic import Arithmetic
from isobit.order.evaluate import add_fp32, flush, fma_fp32
from isobit.order.exact_sum import round_fp32

# The smallest normal exponent of each width.
LOWEST = {8: -126, 11: -14, 24: -126, 53: -1022}


def round_to(exact: Fraction, bits: int) -> float:
    """An exact value to so many significand bits, ties to even, subnormals kept."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, LOWEST[bits]) - bits + 1)
    return math.copysign(float(round(size / unit) * unit), exact)


def cut(value: float, bits: int, how: str) -> float:
    """A number to fewer significand bits."""
    fraction, exponent = math.frexp(value)
    scaled = math.ldexp(fraction, bits)
    return math.ldexp(math.trunc(scaled) if how.startswith("truncated") else round(scaled), exponent - bits)


def replay(
    steps: Sequence[Step], arithmetic: Arithmetic, values: Sequence[float], factors: Sequence[float], output_bits: int
) -> float:
    """The sum; values and factors are finite."""
    terms, others = list(values), list(factors)
    if arithmetic.terms_cut_to is not None:
        terms = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in terms]
        if "factors" in arithmetic.cut_how:
            others = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in others]
    if arithmetic.keeps_subnormal_terms is False:
        terms, others = [flush(v) for v in terms], [flush(v) for v in others]
    products = arithmetic.products not in ("none", "exact")
    if arithmetic.products == "exact":
        terms = [a * b for a, b in zip(terms, others, strict=True)]
    rounded = arithmetic.rounded
    sums: list[float] = []
    for step, width in zip(steps, arithmetic.widths, strict=True):
        known: list[float] = []  # operands that are fp32 numbers already
        fused: list[int] = []  # terms whose exact product enters
        for child in step:
            if child >= 0:
                known.append(sums[child])
            elif not products:
                known.append(terms[~child])
            elif ~child in rounded:
                known.append(round_fp32(terms[~child] * others[~child]))
            else:
                fused.append(~child)
        if width == 24 and len(known) == 2 and not fused:
            total = add_fp32(*known)
        elif width == 24 and len(known) == len(fused) == 1:
            total = fma_fp32(terms[fused[0]], others[fused[0]], known[0])
        else:
            exact = sum((Fraction(v) for v in known), Fraction(0))
            exact += sum((Fraction(terms[i]) * Fraction(others[i]) for i in fused), Fraction(0))
            total = round_to(exact, width)
        sums.append(flush(total) if arithmetic.keeps_subnormal_sums is False else total)
    return round_to(Fraction(sums[-1]), output_bits)
