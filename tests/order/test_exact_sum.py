"""The exact sum equals rational arithmetic, rounded once, in any order."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobit.order.exact_sum import exact_sum, exact_sum_fp32, round_fp32

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded_by_fractions(exact):
    """To 24 bits, ties to even, subnormals kept."""
    size = abs(exact)
    if not size:
        return 0.0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return math.copysign(float(round(size / unit) * unit), exact)


@given(st.lists(FP32, max_size=40))
def test_fp32_sum_is_rounded_once(values):
    true = sum(map(Fraction, values), Fraction(0))
    assert exact_sum_fp32(values) == round_fp32(rounded_by_fractions(true))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), st.randoms())
def test_order_does_not_matter(values, rng: random.Random):
    shuffled = values[:]
    rng.shuffle(shuffled)
    assert exact_sum(values) == exact_sum(shuffled)
    assert math.copysign(1, exact_sum(values)) == math.copysign(1, exact_sum(shuffled))


@pytest.mark.parametrize("tail", [2.0**-80, -(2.0**-80), 0.0])
def test_a_tie_of_fp32_is_decided_by_what_fp64_drops(tail):
    values = [1.0, 2.0**-24, tail]
    assert exact_sum_fp32(values) == (1.0 + 2.0**-23 if tail > 0 else 1.0)
    assert round_fp32(math.fsum(values)) == 1.0  # two roundings lose it


def test_specials():
    assert math.isnan(exact_sum([1.0, math.nan]))
    assert math.isnan(exact_sum([math.inf, -math.inf]))
    assert exact_sum([math.inf, 1.0]) == math.inf
    assert exact_sum_fp32([3e38, 3e38]) == math.inf
    assert exact_sum([1e308, 1e308, -1e308]) == 1e308
    assert math.copysign(1, exact_sum([-0.0, -0.0])) == 1
    assert exact_sum([]) == 0.0
