"""Figures of an audit as words: shares, sizes, counts, and which of them were not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isobit.auditing.records import AxisReport, Effect, Guilty

MISSING = "–"
# What changes along each axis, after "depends on".
VARIES = {
    "batch": "the batch",
    "padding": "the padding",
    "packing": "how samples are packed",
    "decode": "whether tokens are decoded or prefilled",
    "chunks": "how a prompt is cut into chunks",
    "threads": "the number of threads",
    "compile": "whether the model is compiled",
    "tp": "the number of tensor-parallel ranks",
    "dp": "the number of data-parallel ranks",
}


def percent(share: float | None) -> str:
    """Write a share so that only an exact 0 or 1 reads as 0 % or 100 %."""
    if share is None:
        return MISSING
    if not math.isfinite(share):
        return magnitude(share)
    size, sign = abs(share) * 100, "-" if share < 0 else ""
    if size == 0:
        return "0 %"
    if size < 0.1:
        return "<0.1 %" if share > 0 else ">-0.1 %"
    if size != 100 and 99.9 < size < 100.1:
        return f"{sign}>99.9 %" if size < 100 else f"{sign}≈100 %"
    near = size < 10 or (99 < size < 101 and size != 100)
    return f"{sign}{size:.1f} %" if near else f"{sign}{size:.0f} %"


def magnitude(value: float | None) -> str:
    """Write a size with two digits, such as `3.0e-3` or `0.7`."""
    if value is None:
        return MISSING
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 100:
        return f"{value:.2g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def ratio(value: float | None) -> str:
    """Write a ratio, such as that of two times or errors, with at least two digits."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or (value and not 0.001 <= abs(value) < 1e6):
        return magnitude(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ulps_of(one: Guilty) -> str:
    """Write the largest distance of an operator's two results."""
    return "NaN" if one.ulps is None else f"{one.ulps:,}"


def counted(number: int, noun: str) -> str:
    """Write a number and its noun, in the plural unless there is one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Join words as a sentence does: `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def depends(axis: str, number: int) -> str:
    """Write what `number` guilty operators of an axis do, such as `depend on the batch`."""
    end = "s" if number == 1 else ""
    if axis == "repeat":
        return f"change{end} from run to run"
    return f"depend{end} on {VARIES.get(axis, axis)}"


def differing(effect: Effect | None) -> str:
    """Write how many results differ, such as `5 of 23 log-probabilities`."""
    if effect is None:
        return "not measured"
    return f"{effect.differ:,} of {effect.numbers:,} {effect.quantity}"


def changed(effect: Effect | None) -> str:
    """Write how many results differ and by how much."""
    if effect is None:
        return "not measured"
    if not effect.differ:
        return f"none of {effect.numbers:,} {effect.quantity}"
    return f"{differing(effect)}, by at most {magnitude(effect.largest)}"


def flipped(effect: Effect | None) -> str:
    """Write how often another token is the likeliest."""
    if effect is None or effect.flips is None:
        return MISSING
    return f"{effect.flips:,} of {effect.positions:,}"


def cumulated(guilty: Sequence[Guilty]) -> list[float | None]:
    """Return the share of each operator and of those before it; None from the first unmeasured one."""
    total, sums = 0.0, list[float | None]()
    for one in guilty:
        if one.share is None or (sums and sums[-1] is None):
            sums.append(None)
        else:
            total += one.share
            sums.append(round(total, 12))  # shares are sums of rounded numbers themselves
    return sums


def describe_kind(one: Guilty) -> str:
    """Write what the kind of a difference means, and whether anything reads the result."""
    error = "this is a bug, not rounding"
    if one.accuracy.approximation:
        error = "larger than rounding explains, a bug or an approximation"
    meaning = {
        "order": "both results are as accurate as rounding allows",
        "error": error,
        "random": "it draws random numbers",
    }.get(one.kind)
    text = f"{one.kind}: {meaning}" if meaning else one.kind
    return f"{text}; nothing in the run reads this result" if one.unread else text


def errors_of(one: Guilty, sides: tuple[str, str]) -> str:
    """Write how far both results of an operator are from the reference."""
    found = one.accuracy
    if found.reference == "none" or (found.run is None and found.variant is None):
        return "not compared: the operator has no wider executor"
    parts = [f"{sides[0]} {ratio(found.run)}", f"{sides[1]} {ratio(found.variant)}"]
    if found.isobit is not None:
        parts.append(f"isobit {ratio(found.isobit)}")
    return f"{', '.join(parts)} (error against {found.reference} over what rounding can explain)"


def unjudged_by_reason(axis: AxisReport) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Return every reason with its count and its operators, the most frequent first."""
    reasons: dict[str, dict[str, int]] = {}
    for one in axis.unjudged:
        operators = reasons.setdefault(one.reason, {})
        operators[one.place.operator] = operators.get(one.place.operator, 0) + 1
    found = [
        (reason, sum(names.values()), sorted(names.items(), key=lambda item: (-item[1], item[0])))
        for reason, names in reasons.items()
    ]
    return sorted(found, key=lambda item: (-item[1], item[0]))


def total_of(axis: AxisReport) -> str:
    """Say which outputs were not compared, because they are one number over all samples."""
    return f"not compared, a number over all samples: {', '.join(axis.not_compared)}"
