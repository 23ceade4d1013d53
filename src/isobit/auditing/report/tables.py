"""Tables of an audit's page: axes, operators by their share of the effect, and what was not judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from isobit.auditing.records import Audit, AxisReport, Effect, Group, Guilty, Skipped
from isobit.auditing.report.figures import (
    MISSING,
    changed,
    counted,
    cumulated,
    errors_of,
    flipped,
    magnitude,
    percent,
    ratio,
    total_of,
    ulps_of,
    unjudged_by_reason,
)
from isobit.report.markup import SHOWN, escape, table

FEW = 8  # operators that are shown before the others are unfolded
EXAMPLES = 6  # operators that are named per reason
MATRIX = (
    "axis",
    "guilty, of judged",
    "without<br>a verdict",
    "results that differ",
    "max |Δ|",
    "mean(e<sup>d</sup> − 1 − d)",
    "argmax<br>flips",
    "e<sup>d</sup> outside<br>[0.8, 1.2]",
    "complete",
)
BLAME = ("share of the effect", "together", "operator", "kind", "elements", "ulp", "max |Δ|")
REST = ("operator", "axis", "first difference", "errors", "shapes", "source", "remedy", "price")


def _row(cells: Sequence[str], kinds: Mapping[int, str] | None = None) -> str:
    kinds = kinds or {}
    return (
        "<tr>" + "".join(f'<td class="{kinds.get(at, "")}">{c}' for at, c in enumerate(cells))
    ).replace(' class=""', "")


def show_matrix(audit: Audit) -> str:
    """Return the table of axes, with the reason of each that was skipped."""
    rows = [_axis(axis) for axis in audit.axes] + [_skipped(one) for one in audit.skipped]
    rows += [_skipped(one, "left out") for one in audit.left_out]
    if not rows:
        return '<p class="soft">No axis was audited.</p>'
    note = (
        '<p class="soft">d is the difference of a log-probability between the two runs. An axis is complete if the '
        "variant is reached bit for bit by substituting the guilty operators' results.</p>"
    )
    return table(MATRIX, rows) + note


def _axis(axis: AxisReport) -> str:
    effect = axis.effect
    guilty = f"{len(axis.guilty):,} of {axis.judged:,}"
    tone = "bad" if axis.guilty else "good" if axis.judged and axis.complete else "mute"
    complete = ("good", "yes") if axis.complete else ("mute", "no")
    cells = (
        f'<b>{escape(axis.axis)}</b><br><span class="soft">{escape(axis.variation)}</span>',
        f'<span class="chip nowrap {tone}">{guilty}</span>',
        f"{len(axis.unjudged):,}",
        _differing(effect),
        magnitude(effect.largest if effect else None),
        magnitude(effect.k3 if effect else None),
        flipped(effect),
        percent(effect.outside if effect else None),
        '<span class="chip {}">{}</span>'.format(*complete),
    )
    notes = [f"not complete: {axis.why_not}"] if not axis.complete and axis.why_not else []
    notes += [total_of(axis)] if axis.not_compared else []
    why = "".join(
        f'<tr><td colspan="{len(MATRIX)}" class="soft reason">{escape(note)}' for note in notes
    )
    return _row(cells, {0: "axis-name", **dict.fromkeys((2, 4, 5, 6, 7), "figure")}) + why


def _differing(effect: Effect | None) -> str:
    if effect is None:
        return "not measured"
    what = f'<span class="soft">{escape(effect.quantity)}</span>'
    return f'<span class="nowrap">{effect.differ:,} of {effect.numbers:,}</span><br>{what}'


def _skipped(one: Skipped, what: str = "not audited") -> str:
    reason = f'<td colspan="{len(MATRIX) - 1}" class="soft">{what}: {escape(one.reason)}'
    return f"<tr><td><b>{escape(one.axis)}</b>{reason}"


def show_blame(axis: AxisReport, anchors: Mapping[int, str]) -> str:
    """Return the guilty operators of an axis by their share; `anchors` lead to the details, by index."""
    sums = cumulated(axis.guilty)
    rows = [_blamed(one, sums[at], anchors.get(at, "")) for at, one in enumerate(axis.guilty)]
    groups = ""
    if any(group.members > 1 for group in axis.groups):
        members = [_group(group) for group in axis.groups]
        heads = ("share of the effect", f"{escape(axis.grouped_by)}", "members", "changes")
        groups = f'<p class="soft">Effects that were measured together:</p>{table(heads, members)}'
    title = f"<h3>{escape(axis.axis)}: {escape(axis.variation)}</h3>"
    shown = max(FEW, sum(bool(one.share) for one in axis.guilty))
    return f"{title}{_about_shares(axis)}{groups}{table(BLAME, rows, min(shown, SHOWN))}"


def _about_shares(axis: AxisReport) -> str:
    """Say what the shares are of, what they add up to, and what they cost."""
    measured = [one.share for one in axis.guilty if one.share is not None]
    whole = f"The whole effect: {escape(changed(axis.effect))}"
    total = f" The shares add up to {percent(round(sum(measured), 9))}." if any(measured) else ""
    if total and not axis.complete:
        total += " The list is not complete: they are shares of what these operators change."
    if len(measured) < len(axis.guilty):
        left = len(axis.guilty) - len(measured)
        total += f" Without a share of its own: {counted(left, 'operator')}."
    if any(share < 0 for share in measured):
        total += " A negative share: substituting the operator moves the results apart."
    cost = f" {counted(axis.forwards, 'run')} of the model measured them." if axis.forwards else ""
    if axis.cost is not None:
        cost += f" Finding the operators took {ratio(axis.cost)} times as long as one run."
    return f'<p class="soft">{whole}.{total}{cost}</p>'


def _amount(share: float | None) -> str:
    """Return a share as a bar and as a figure."""
    if share is None:
        return MISSING
    width = 100 * min(max(share, 0.0), 1.0) if share == share else 0
    bar = f'<span class="amount" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'
    return f"{bar}{percent(share)}"


def _blamed(one: Guilty, total: float | None, anchor: str) -> str:
    name = escape(str(one.place))
    name = f'<a href="#{anchor}">{name}</a>' if anchor else name
    source = f'<br><span class="soft">{escape(one.place.source)}</span>' if one.place.source else ""
    kind = f'<span class="chip bad">{escape(one.kind)}</span>'
    cells = (
        _amount(one.share),
        percent(total),
        f"{name}{source}",
        kind if one.kind == "error" else escape(one.kind),
        f"{one.elements:,} of {one.of:,}",
        ulps_of(one),
        magnitude(one.largest),
    )
    return _row(cells, {0: "figure", 1: "figure", 2: "name", 4: "figure", 5: "figure"})


def _group(group: Group) -> str:
    changes = escape(changed(group.effect))
    cells = (_amount(group.share), escape(group.name), f"{group.members:,}", changes)
    return _row(cells, {0: "figure", 1: "name"})


def show_rest(rest: Sequence[tuple[Guilty, AxisReport]], bits: Callable[..., str]) -> str:
    """Return the guilty operators that have no details of their own; `bits` shows a first difference."""
    rows = []
    for one, axis in rest:
        cells = (
            escape(str(one.place)),
            escape(one.axis),
            bits(one, axis.sides),
            escape(errors_of(one, axis.sides)),
            "<br>".join(escape(shape) for shape in one.shapes),
            escape(one.place.source) or MISSING,
            escape(one.remedy) or MISSING,
            ratio(one.price),
        )
        rows.append(_row(cells, {0: "name"}))
    return table(REST, rows, 0).replace(" more<", " other guilty operators<", 1) if rows else ""


def show_unjudged(audit: Audit) -> str:
    """Return what has no verdict, by axis and reason, with counts."""
    rows = []
    for axis in audit.axes:
        for reason, count, operators in unjudged_by_reason(axis):
            names = [f"{name} × {number:,}" for name, number in operators[:EXAMPLES]]
            more = len(operators) - len(names)
            named = ", ".join([*names, f"and {more} more kinds"] if more else names)
            cells = (escape(axis.axis), f"{count:,}", escape(reason), escape(named))
            rows.append(_row(cells, {1: "figure", 2: "name", 3: "name"}))
    if rows:
        return table(("axis", "operators", "reason", "which"), rows)
    judged = sum(axis.judged for axis in audit.axes)
    exact = sum(axis.exact for axis in audit.axes)
    if not judged:
        return '<p class="soft">No operator was seen, so none was judged.</p>'
    return (
        f'<p class="soft">Nothing: {counted(judged, "result")} compared; '
        f"{counted(exact, 'call')} only move bits, compute integers or have no row of the sample.</p>"
    )
