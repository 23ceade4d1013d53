"""Reveal how a tensor core adds: products per step, bits that terms keep, rounding; from sums of chosen powers of two.

[Note: probes of a fused sum]
A row has +B and −B, which cancel, and one small term; see [Note: the fused sum of a tensor core] in order/engines.py.
If all three are in one step, the small term is aligned to B first and keeps F fractional bits of it: it survives down
to B · 2^-F. If it is in a later step, it survives whatever its size; in an earlier one, it is in the accumulator, which
is aligned with B too. So the first survivor behind B marks the end of B's step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.order.engines import TENSOR_CORES, tensor_core

EXTENT = 64  # terms of a row: at least two steps of every known engine
BIG, DEPTH = 2.0**15, 29  # BIG and BIG · 2^-DEPTH are normal numbers of fp16
STARTS = (0, 8, 24, 40)  # places of +BIG
NEAR = range(20, 29)  # bits at which the cut of terms and of the accumulator is looked at
ONE = 2.0**12  # ONE · 2^-24 is a normal number of fp16
FEW = 16  # rows that kernels for few rows take at once

Row = tuple[float, ...]
Sums = Callable[[Sequence[Row]], Sequence[float]]  # rows of EXTENT terms -> the fp32 sum of each


@dataclass(frozen=True)
class FoundLeaf:
    """What the probes say about products of one operand type.

    Attributes:
        dtype: The operand type, "bf16" or "f16".
        fraction: Fractional bits that a term keeps after alignment (F); None if no term was cut.
        products: Products per step (L); None if steps were not seen.
        cut: How bits below are cut: "toward zero", "down" or "not seen".
        rounding: How a step's sum is rounded to fp32: "toward zero", "down" or "to nearest".
        engines: The engines of isobit.order.engines that predict every probe's bits.
        probes: Rows that were summed, by the kernels for many rows and for few.
    """

    dtype: str
    fraction: int | None
    products: int | None
    cut: str
    rounding: str
    engines: tuple[str, ...]
    probes: int

    def __str__(self) -> str:
        """Describe it in one line."""
        bits = "no bits cut" if self.fraction is None else f"{self.fraction} fractional bits"
        step = "no steps seen" if self.products is None else f"{self.products} products a step"
        return f"{step}, {bits}, cut {self.cut}, rounded {self.rounding}"


def row_of(terms: dict[int, float]) -> Row:
    """Return a row with these terms at these places, and +0 elsewhere."""
    return tuple(terms.get(at, 0.0) for at in range(EXTENT))


def pair(start: int) -> dict[int, float]:
    """Return +BIG and −BIG at two neighbouring places."""
    return {start: BIG, start + 1: -BIG}


def size_rows() -> dict[int, Row]:
    """By number of bits, a term that small beside a pair that cancels, in one step."""
    return {f: row_of({**pair(0), 2: BIG * 2.0**-f}) for f in range(1, DEPTH + 1)}


def place_rows() -> dict[tuple[int, int], Row]:
    """By place of the pair and place of the term, the smallest term beside a pair."""
    small = BIG * 2.0**-DEPTH
    return {
        (start, at): row_of({**pair(start), at: small})
        for start in STARTS
        for at in range(EXTENT)
        if at not in (start, start + 1)
    }


def cut_rows() -> dict[int, Row]:
    """By number of bits, a negative term of which a half may be cut."""
    return {f: row_of({**pair(0), 2: -1.5 * BIG * 2.0**-f}) for f in NEAR}


def held_rows() -> dict[int, Row]:
    """By number of bits, a negative term of the first step, in the accumulator when the pair comes."""
    return {f: row_of({0: -1.5 * BIG * 2.0**-f, **pair(40)}) for f in NEAR}


def halfway_rows() -> dict[int, Row]:
    """By sign, a sum half-way between an odd and an even fp32 number."""
    return {
        sign: row_of({0: sign * ONE, 1: sign * ONE * 2.0**-23, 2: sign * ONE * 2.0**-24})
        for sign in (1, -1)
    }


def reveal_tensor_core(sums: Sums, dtype: str) -> FoundLeaf:
    """Find how products of a tensor core are added.

    Args:
        sums: Sums rows of 64 products, each a value of the operand type times 1, in one chain from zero. It is called
            with hundreds of rows, and with at most 16 of them.
        dtype: The operand type, "bf16" or "f16".
    """
    groups: tuple[dict[Any, Row], ...] = (
        size_rows(),
        place_rows(),
        cut_rows(),
        held_rows(),
        halfway_rows(),
    )
    rows = [row for group in groups for row in group.values()]
    found = dict(zip(rows, sums(rows), strict=True))
    sizes, places, cuts, _, halves = ({k: found[r] for k, r in g.items()} for g in groups)
    fraction, ends = count_bits(sizes), step_ends(places)
    few = telling_rows(groups, fraction, ends)
    alike = all(same(found[row], value) for row, value in zip(few, sums(few), strict=True))
    engines = tuple(
        name
        for name, rules in TENSOR_CORES.items()
        if alike and dtype in rules and predicts(name, dtype, found)
    )
    products = None if fraction is None else count_products(ends)
    cut, rounding = read_cut(cuts, fraction), read_rounding(halves)
    return FoundLeaf(dtype, fraction, products, cut, rounding, engines, len(rows) + len(few))


def same(left: float, right: float) -> bool:
    """Return whether two numbers have the same bits."""
    return struct.pack("<d", left) == struct.pack("<d", right)


def predicts(engine: str, dtype: str, found: dict[Row, float]) -> bool:
    """Return whether an engine gives the bits of every sum."""
    add = tensor_core(engine, dtype)
    return all(same(add(None, [(term, 1.0) for term in row]), sum_) for row, sum_ in found.items())


def count_bits(sizes: dict[int, float]) -> int | None:
    """Return the bits down to which terms survive; None if all do."""
    lost = [f for f, value in sizes.items() if value != BIG * 2.0**-f]
    return min(lost) - 1 if lost else None


def step_ends(places: dict[tuple[int, int], float]) -> dict[int, int]:
    """By place of the pair, the first place behind it from which on every term survives; EXTENT if there is none."""
    ends = {}
    for start in STARTS:
        lost = [at for (own, at), value in places.items() if own == start and value == 0.0]
        ends[start] = max(max(lost, default=0), start + 1) + 1
    return ends


def count_products(ends: dict[int, int]) -> int | None:
    """Return the products per step that explain where the steps of all pairs end, or None."""
    for products in range(2, EXTENT + 1):
        if all(end == (start // products + 1) * products for start, end in ends.items()):
            return products
    return None


def read_cut(cuts: dict[int, float], fraction: int | None) -> str:
    """Return how the last bit of a negative term is cut."""
    if fraction is None or fraction not in cuts:
        return "not seen"
    unit = BIG * 2.0**-fraction
    return {-unit: "toward zero", -2 * unit: "down"}.get(cuts[fraction], "not seen")


def read_rounding(halves: dict[int, float]) -> str:
    """Return how a sum half-way between two fp32 numbers is rounded."""
    low, high = ONE * (1 + 2.0**-23), ONE * (1 + 2.0**-22)
    known = {
        (low, -low): "toward zero",
        (low, -high): "down",
        (high, -high): "to nearest",
        (high, -low): "up",
    }
    return known.get((halves[1], halves[-1]), "not seen")


def telling_rows(
    groups: Sequence[dict[Any, Row]],
    fraction: int | None,
    ends: dict[int, int],
) -> list[Row]:
    """Return at most FEW rows, on both sides of every edge that was found."""
    sizes, places, *others = groups
    edge = fraction or NEAR[0]
    chosen = [sizes[f] for f in (edge, edge + 1) if f in sizes]
    chosen += [
        places[start, at]
        for start, end in ends.items()
        for at in (end - 1, end)
        if (start, at) in places
    ]
    for group in others:
        chosen += [group[key] for key in (edge, 1, -1) if key in group]
    return chosen[:FEW]
