"""Sums of fp32 numbers that look like a plain tree of additions to some probes: functions of a list of floats."""

import math
from fractions import Fraction
from zlib import crc32

from isobit.order.evaluate import add_fp32 as add
from isobit.order.exact_sum import round_fp32
from isobit.reveal.certificate import add_compensated
from isobit.reveal.certificate import add_corrected as sum2
from tests.attacks.plain_sums import fold, fold_fp64, in_pairs


def two_sum(a, b):
    total = add(a, b)
    there = add(total, -a)
    return total, add(add(a, -add(total, -there)), add(b, -there))


# ---- compensated ---------------------------------------------------------------------------------------------


def sum_k(k):
    """Ogita, Rump and Oishi: errors of a chain become the terms of the next one, k - 1 times over."""

    def run(values):
        values = list(values)
        for _ in range(k - 1):
            for i in range(1, len(values)):
                values[i], values[i - 1] = two_sum(values[i], values[i - 1])
        return fold(values)

    return run


def neumaier(values):
    total = errors = 0.0
    for value in values:
        grown = add(total, value)
        large, small = (total, value) if abs(total) >= abs(value) else (value, total)
        errors = add(errors, add(add(large, -grown), small))
        total = grown
    return add(total, errors)


def klein(values):
    """Neumaier's errors are compensated in turn."""
    total = first = second = 0.0
    for value in values:
        total, error = two_sum(total, value)
        first, error = two_sum(first, error)
        second = add(second, error)
    return add(total, add(first, second))


def pairwise_two_sum(values):
    def join(left, right):
        total, error = two_sum(left[0], right[0])
        return total, add(error, add(left[1], right[1]))

    return add(*in_pairs([(value, 0.0) for value in values], join))


def compensated_in_blocks(values):
    return fold([sum2(values[at : at + 8]) for at in range(0, len(values), 8)])


def compensated_where_large(values):
    return sum2(values) if max(map(abs, values)) > 2.0**20 else fold(values)


def double_double(values):
    """Two fp64 numbers hold the sum."""
    high = low = 0.0
    for value in values:
        total = high + value
        there = total - high
        low += (high - (total - there)) + (value - there)
        high = total
    return round_fp32(high + low)


# ---- exact in a window ---------------------------------------------------------------------------------------


def window(low, high=1024):
    """A fixed-point accumulator from 2^low to 2^high."""

    def run(values):
        total = sum(
            round(math.ldexp(value, -low)) if abs(value) >= 2.0**low else 0 for value in values
        )
        return round_fp32(
            math.ldexp(float(max(min(total, 1 << (high - low)), -(1 << (high - low)))), low)
        )

    return run


def binned(levels, bits):
    """As reproducible sums are made: bins below the largest exponent, each exact."""

    def run(values):
        top = math.frexp(max(map(abs, values)))[1]
        total, rest = 0.0, list(values)
        for level in range(1, levels + 1):
            unit = top - level * bits
            cut = [math.ldexp(round(math.ldexp(value, -unit)), unit) for value in rest]
            rest = [value - part for value, part in zip(rest, cut, strict=True)]
            total += math.fsum(cut)
        return round_fp32(total)

    return run


def aligned_blocks(values):
    """Tensor cores: blocks of 8 with the accumulator, cut at the largest exponent's last place, then added."""
    total = 0.0
    for at in range(0, len(values), 8):
        block = [total, *values[at : at + 8]]
        if not all(map(math.isfinite, block)):
            return sum(block)
        unit = math.frexp(max(map(abs, block)))[1] - 26
        exact = sum(math.trunc(math.ldexp(value, -unit)) for value in block)
        total = round_fp32(math.ldexp(float(exact), unit))
    return total


def wide_and_sorted(bits):
    """Falling sizes into an accumulator of so many bits, then fp64, then fp32."""

    def run(values):
        total = Fraction(0)
        for value in sorted(values, key=abs, reverse=True):
            total += Fraction(value)
            if total:
                size = abs(total).numerator.bit_length() - total.denominator.bit_length()
                unit = Fraction(2) ** (size - bits)
                total = round(total / unit) * unit
        return round_fp32(float(total))

    return run


# ---- other roundings -----------------------------------------------------------------------------------------


def to_odd(values):
    """Inexact sums end in a one."""
    total = values[0]
    for value in values[1:]:
        exact = total + value
        near = round_fp32(exact)
        if near != exact and math.isfinite(near) and not _is_odd(near):
            near = round_fp32(exact + math.copysign(_last_place(near) / 2, exact - near))
        total = near
    return total


def _is_odd(value):
    return round(math.frexp(value)[0] * 2**24) & 1 == 1


def _last_place(value):
    return math.ldexp(1.0, max(math.frexp(value)[1] - 24, -149))


def by_hash(values):
    """Rounded up or down by what the operands hash to: repeatable, and no function of their sum."""
    total = values[0]
    for value in values[1:]:
        exact = total + value
        near = round_fp32(exact)
        if near != exact and math.isfinite(near) and crc32(repr((total, value)).encode()) & 1:
            near = round_fp32(near + math.copysign(_last_place(near), exact - near))
        total = near
    return total


def twenty_six_bits(values):
    total = 0.0
    for value in values:
        fraction, exponent = math.frexp(total + value)
        total = math.ldexp(round(math.ldexp(fraction, 26)), exponent - 26)
    return round_fp32(total)


def flush_every_eighth(values):
    total = values[0]
    for at, value in enumerate(values[1:]):
        total = add(total, value)
        total = 0.0 if at % 8 == 7 and abs(total) < 2.0**-126 else total
    return total


# ---- orders that follow the data -----------------------------------------------------------------------------


def by_first_sign(values):
    return in_pairs(values) if values[0] < 0 else fold(values)


def by_largest_exponent(values):
    return in_pairs(values) if 2.0**6 < max(map(abs, values)) < 2.0**20 else fold(values)


def by_positivity(values):
    return in_pairs(values) if min(values) > 0 else fold(values)


def without_zeros(values):
    """Compacts a sparse vector, then adds in pairs, so that zeros move its terms."""
    return in_pairs([value for value in values if value] or [0.0])


def by_being_sorted(values):
    return in_pairs(values) if values == sorted(values) else fold(values)


def by_size(values):
    return fold(sorted(values, key=abs, reverse=True))


def demmel_hida(values):
    """Falling exponents, into a wider accumulator."""
    return round_fp32(fold_fp64(sorted(values, key=lambda value: -math.frexp(value)[1])))


WRONG = {
    "Kahan": add_compensated,
    "Sum2": sum2,
    "SumK, K = 3": sum_k(3),
    "SumK, K = 5": sum_k(5),
    "Neumaier": neumaier,
    "Klein": klein,
    "TwoSum in pairs": pairwise_two_sum,
    "Sum2 in blocks of 8": compensated_in_blocks,
    "Sum2 above 2^20": compensated_where_large,
    "double-double": double_double,
    "window from 2^-30": window(-30),
    "window from 2^-140": window(-140),
    "window to 2^100": window(-149, 100),
    "three bins": binned(3, 12),
    "one bin": binned(1, 30),
    "twelve bins": binned(12, 12),
    "aligned blocks of 8": aligned_blocks,
    "round to odd": to_odd,
    "rounded by a hash": by_hash,
    "26 bits": twenty_six_bits,
    "every eighth sum flushed": flush_every_eighth,
    "by the first sign": by_first_sign,
    "by the largest exponent": by_largest_exponent,
    "by equality": lambda values: (in_pairs if len(set(values)) == 1 else fold)(values),
    "by positivity": by_positivity,
    "without zeros": without_zeros,
    "by being sorted": by_being_sorted,
    "sorted, 200 bits": wide_and_sorted(200),
    "by size": by_size,
    "Demmel and Hida": demmel_hida,
    "sorted, double-double": lambda values: double_double(sorted(values, key=abs, reverse=True)),
}
