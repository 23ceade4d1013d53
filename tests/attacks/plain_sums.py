"""Sums of fp32 numbers that are a plain tree of additions, or exact: functions of a list of floats."""

import math

from isobit.order.evaluate import add_fp32 as add
from isobit.order.exact_sum import exact_sum_fp32, round_fp32


def fold(values):
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total


def in_pairs(values, add=add):
    values = list(values)
    while len(values) > 1:
        odd = values[len(values) - len(values) % 2 :]
        values = [add(a, b) for a, b in zip(values[0::2], values[1::2], strict=False)] + odd
    return values[0]


def fold_fp64(values):
    total = 0.0
    for value in values:
        total += value
    return total


def fused_by_four(values):
    """Four terms and the accumulator in one addition, in fp64, then fp32: two roundings."""
    total = 0.0
    for at in range(0, len(values), 4):
        total = round_fp32(math.fsum([total, *values[at : at + 4]]))
    return total


def flushed(values):
    """Subnormals are zero, as terms and as sums."""

    def flush(value):
        return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value

    total = flush(values[0])
    for value in values[1:]:
        total = flush(add(total, flush(value)))
    return total


def in_tf32(values):
    """Terms lose 13 bits of their encoding, subnormal terms too."""

    def cut(value):
        unit = max(math.frexp(value)[1] - 11, -136)
        return math.ldexp(math.trunc(math.ldexp(value, -unit)), unit)

    return fold([cut(value) for value in values])


def stripes(values):
    return in_pairs([fold(values[lane::4]) for lane in range(4)])


RIGHT = {
    "fold": fold,
    "fold from the end": lambda values: fold(values[::-1]),
    "pairs": in_pairs,
    "stripes": stripes,
    "fp64": lambda values: round_fp32(fold_fp64(values)),
    "fsum": lambda values: round_fp32(math.fsum(values)),
    "exact, rounded once": exact_sum_fp32,
    "fused by four": fused_by_four,
    "flushed": flushed,
    "tf32 terms": in_tf32,
}
