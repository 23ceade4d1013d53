"""The bit-exact evaluator: a sum in the defined order, by exact arithmetic. Slow, and the oracle of every executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from isobit.order.exact_sum import round_fp32
from isobit.order.plan import LANES, Segment
from isobit.order.tree import Tree, chain, merge

SMALLEST_NORMAL = 2.0**-126
AMX_BLOCK = 32

# What an engine does with a run of products: (accumulator so far, or None; factors) -> accumulator.
Engine = Callable[["float | None", Sequence[tuple[float, float]]], float]


def fma_fp32(a: float, b: float, c: float) -> float:
    """a*b + c rounded once to fp32; the three are fp32 values."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of an exact zero follows IEEE, as fp64 does
    return round_fraction(exact)


def round_fraction(exact: Fraction) -> float:
    """An exact value to fp32, to nearest, ties to even, subnormals kept."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    scaled = round(size / unit)  # Python rounds ties to even
    return math.copysign(round_fp32(float(scaled * unit)), exact)


def add_fp32(a: float, b: float) -> float:
    """fp32 addition; fp64 holds enough for one rounding to be right."""
    return round_fp32(a + b)


def flush(value: float) -> float:
    """Subnormals to zero, sign kept."""
    return math.copysign(0.0, value) if abs(value) < SMALLEST_NORMAL else value


def chain_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """fp32 on every CPU: the ascending chain of fused multiply-adds from +0, then added to what was before."""
    total = 0.0
    for a, b in factors:
        total = fma_fp32(a, b, total)
    return total if before is None else add_fp32(before, total)


def amx_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """bf16 on AMX: per 32 products an even and an odd chain, then their sum to the accumulator; subnormals are zero."""
    total = 0.0 if before is None else before
    if not factors:
        return total if before is None else add_fp32(total, 0.0)
    for at in range(0, len(factors), AMX_BLOCK):
        halves = [0.0, 0.0]
        for i, (a, b) in enumerate(factors[at : at + AMX_BLOCK]):
            halves[i % 2] = flush(fma_fp32(flush(a), flush(b), halves[i % 2]))
        total = flush(add_fp32(flush(total), flush(add_fp32(*halves))))
    return total


def striped_engine(before: float | None, factors: Sequence[tuple[float, float]]) -> float:
    """A plain sum (the second factors are ones): 16 lanes, each an ascending chain, merged by the tree."""
    lanes = [0.0] * LANES
    for i, (value, _) in enumerate(factors):
        lanes[i % LANES] = add_fp32(lanes[i % LANES], value)
    total = merge(lanes, add_fp32)
    return total if before is None else add_fp32(before, total)


ENGINES: dict[str, Engine] = {
    "chain": chain_engine,
    "amx": amx_engine,
    "striped": striped_engine,
}


def evaluate_segment(segment: Segment, factors: Sequence[tuple[float, float]], engine: Engine) -> float:
    """One segment: its leaves, folded left through the engine's accumulator."""
    total: float | None = None
    for leaf in segment:
        run = factors[leaf.start : leaf.start + leaf.length]
        total = engine(total if leaf.fold else None, run)
    return 0.0 if total is None else total


def evaluate(segments: Sequence[Segment], factors: Sequence[tuple[float, float]], engine: Engine) -> float:
    """A whole sum of products in fp32, before bias and rounding."""
    return merge([evaluate_segment(s, factors, engine) for s in segments], add_fp32)


def leaf_tree(engine: str, indices: Sequence[int]) -> list[Tree]:
    """What an engine adds to its accumulator for one run, in order."""
    if engine == "chain":
        return [chain(indices)]
    blocks = [indices[at : at + AMX_BLOCK] for at in range(0, len(indices), AMX_BLOCK)]
    return [(chain(block[0::2]), chain(block[1::2])) if len(block) > 1 else block[0] for block in blocks]


def expected_tree(segments: Sequence[Segment], engine: str) -> Tree:
    """The tree that a kernel must show when probed."""
    sums: list[Tree] = []
    for segment in segments:
        terms = [
            term
            for leaf in segment
            if leaf.length
            for term in leaf_tree(engine, range(leaf.start, leaf.start + leaf.length))
        ]
        sums.append(chain(terms))
    return merge(sums, lambda a, b: (a, b))
