"""The conclusion of an audit in one sentence, per axis and for the whole, from its record alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isobit.auditing.records import RANDOM, Audit, AxisReport, Effect, Guilty

# Figures of an audit as words: shares, sizes, counts, and which of them were not measured.

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


MOST = 0.9  # operators are counted until they make this part of the effect


def conclude(audit: Audit) -> str:
    """Return the conclusion of an audit: the axis that matters most, then the others in short.

    Args:
        audit: what was found.

    Returns:
        One sentence, and one more for each kind of verdict on the other axes.

    Example:
        >>> from isobit.auditing.records import Audit
        >>> conclude(Audit("tiny", "2 samples", axes=()))
        'Nothing was audited, so nothing follows.'
    """
    if not audit.axes:
        skipped = f": {listed([s.axis for s in audit.skipped])} could not be varied"
        return f"Nothing was audited{skipped if audit.skipped else ''}, so nothing follows."
    ranked = rank_axes(audit)
    if audit.kept and len(ranked) > 1 and all(map(_is_clean, ranked)):
        return _clean(ranked)
    parts = [conclude_axis(ranked[0])]
    guilty = [axis for axis in ranked[1:] if axis.guilty]
    if guilty:
        found = [f"{_count(axis)} {depends(axis.axis, len(axis.guilty))}" for axis in guilty]
        parts.append(f"Also, {'; '.join(found)}.")
    clean = [axis.axis for axis in ranked[1:] if _is_clean(axis)]
    if clean:
        parts.append(f"No operator is guilty on the {_axes(clean)}.")
    open_ = [a.axis for a in ranked[1:] if not a.guilty and not _is_clean(a)]
    if open_:
        parts.append(f"Without a conclusion: the {_axes(open_)}.")
    if audit.skipped:
        parts.append(f"Not audited: the {_axes([s.axis for s in audit.skipped])}.")
    return " ".join(parts)


def rank_axes(audit: Audit) -> list[AxisReport]:
    """Return the axes: with errors first, then with guilty operators, by the size of the effect."""
    return sorted(audit.axes, key=_weight, reverse=True)


def conclude_axis(axis: AxisReport) -> str:
    """Return the conclusion on one axis in one sentence."""
    if not axis.guilty:
        return _not_guilty(axis)
    errors = [one for one in axis.guilty if one.is_error]
    random = [one for one in axis.guilty if one.kind == RANDOM]
    start = f"{_count(axis)} {depends(axis.axis, len(axis.guilty))}"
    bugs = [one for one in errors if not one.accuracy.approximation]
    if bugs:
        start = f"This is a bug, not rounding: {_bug(bugs, errors, axis)}; {start}"
    elif errors:
        start = f"A bug or an approximation: {_bug(errors, errors, axis)}; {start}"
    if random:
        whom = f"{len(random):,} of them draw"
        if len(random) == len(axis.guilty):
            whom = "it draws" if len(random) == 1 else "all of them draw"
        start += f" ({whom} random numbers, as a dropout that was left on does)"
    unread = sum(one.unread for one in axis.guilty)
    if unread:
        whom = f"{unread:,} of them" if unread < len(axis.guilty) else "all of them"
        whom = "it" if len(axis.guilty) == 1 else whom
        start += f" ({whom} only in a result that nothing in the run reads)"
    return f"{start}; {_effect(axis)}; {_closing(axis)}."


def tone(audit: Audit) -> str:
    """Return a class of colours for the whole: good, bad, or mute where not enough was judged."""
    return {0: "good", 1: "bad"}.get(audit.exit_code, "mute")


def _weight(axis: AxisReport) -> tuple[bool, bool, bool, float, int]:
    error = any(one.is_error for one in axis.guilty)
    differ = axis.effect is not None and axis.effect.differ > 0
    largest = axis.effect.largest if axis.effect is not None else 0.0
    largest = largest if largest == largest else float("inf")  # a NaN is the worst
    read = any(not one.unread for one in axis.guilty)
    return error, read, differ or not _is_clean(axis), largest, len(axis.guilty)


def _is_clean(axis: AxisReport) -> bool:
    differ = axis.effect is not None and axis.effect.differ > 0
    return bool(axis.judged) and not axis.guilty and axis.complete and not differ


def _axes(names: list[str]) -> str:
    return f"{'axis' if len(names) == 1 else 'axes'} {listed(names)}"


def _clean(axes: list[AxisReport]) -> str:
    judged = listed([f"{axis.axis} ({axis.judged:,} judged)" for axis in axes])
    return f"No operator is guilty on the axes {judged}: on each, both runs agree bit for bit."


def _count(axis: AxisReport) -> str:
    judged = counted(axis.judged, "judged operator")
    return f"{len(axis.guilty):,} of {judged}"


def _not_guilty(axis: AxisReport) -> str:
    left = counted(len(axis.unjudged), "operator")
    without = _without(axis) if axis.unjudged else "no operator was compared"
    differ = axis.effect is not None and axis.effect.differ > 0
    seen = f"{differing(axis.effect)} differ, by at most {_largest(axis)}" if differ else ""
    if not axis.judged:
        seen = f", although {seen}" if seen else ""
        return f"Nothing was judged on the axis {axis.axis} ({without}), so nothing follows{seen}."
    none = f"None of {counted(axis.judged, 'judged operator')} {depends(axis.axis, 1)}"
    if differ:
        cause = (
            f"the cause is among the {left} without a verdict"
            if axis.unjudged
            else "the cause was not found"
        )
        return f"{none}, yet {seen}: {cause}."
    if axis.complete:
        return f"{none}: {axis.sides[0]} and {axis.sides[1]} agree bit for bit."
    why = axis.why_not or (without if axis.unjudged else "no reason was recorded")
    return f"{none}, but the list was not shown to be complete: {why}."


def _without(axis: AxisReport) -> str:
    verb = "has" if len(axis.unjudged) == 1 else "have"
    return f"{counted(len(axis.unjudged), 'operator')} {verb} no verdict"


def _bug(shown: list[Guilty], errors: list[Guilty], axis: AxisReport) -> str:
    """Return how large the worst error of `shown` is, and how many more errors there are."""
    worst = max(shown, key=lambda one: max(one.accuracy.run or 0, one.accuracy.variant or 0))
    run, variant = worst.accuracy.run or 0.0, worst.accuracy.variant or 0.0
    side, error = (axis.sides[0], run) if run >= variant else (axis.sides[1], variant)
    more = f", and {counted(len(errors) - 1, 'other')}" if len(errors) > 1 else ""
    size = f" {ratio(error)} times what rounding can explain" if error else " too large"
    return f"in “{side}” the error of {worst.place} is{size}{more}"


def _effect(axis: AxisReport) -> str:
    """Return what the guilty operators do to the results."""
    if axis.effect is None:
        return "what this does to the results was not measured"
    if not axis.effect.differ:
        pronoun = "it changes" if len(axis.guilty) == 1 else "they change"
        return f"{pronoun} none of {axis.effect.numbers:,} {axis.effect.quantity} for this input"
    whole = f"{differing(axis.effect)} differ, by at most {_largest(axis)}"
    guilty = sorted(axis.guilty, key=lambda one: -abs(one.share or 0.0))
    shares = cumulated(guilty)
    if shares[0] is None:
        return f"{whole}; shares of single operators were not measured"
    if not any(one.share for one in guilty):
        return f"{whole}, and none of it is made by {'it' if len(guilty) == 1 else 'them'}"
    part = "of the effect" if axis.complete else "of the effect of those found"
    if len(guilty) == 1:
        return f"it makes {percent(shares[0])} {part} ({whole})"
    if shares[0] >= 0.5:
        return f"one of them, {guilty[0].place}, makes {percent(shares[0])} {part} ({whole})"
    for at, share in enumerate(shares):
        if share is not None and share >= MOST:
            return f"{at + 1:,} of them make {percent(share)} {part} ({whole})"
    return f"the largest share of one operator is {percent(shares[0])} ({whole})"


def _largest(axis: AxisReport) -> str:
    return magnitude(axis.effect.largest if axis.effect else None)


def _closing(axis: AxisReport) -> str:
    """Return whether the list is complete, and how that was checked."""
    substituted = "with all of them substituted" if len(axis.guilty) > 1 else "with it substituted"
    if axis.complete:
        found = axis.effect is not None and axis.effect.differ
        start = "nothing else does" if found else "the list is complete"
        return f"{start}: {substituted}, “{axis.sides[0]}” equals “{axis.sides[1]}” bit for bit"
    why = f" ({axis.why_not})" if axis.why_not else ""
    if axis.remaining is not None and axis.remaining.differ:
        still = f"{differing(axis.remaining)} still differ"
        left = f", and {_without(axis)}" if axis.unjudged else why
        return f"the list is not complete: {substituted}, {still}{left}"
    return f"the list was not shown to be complete{why}"
