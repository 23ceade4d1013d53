"""A self-contained HTML page of an audit: the conclusion, the axes, who is to blame, and each guilty operator."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from isobit.auditing.records import Audit, AxisReport, Effect, Group, Guilty, Skipped
from isobit.auditing.report import strip as audit_strip
from isobit.auditing.report.json import OrderSummary, plain_audit
from isobit.auditing.report.sentence import (
    MISSING,
    changed,
    conclude,
    conclude_axis,
    counted,
    cumulated,
    describe_kind,
    errors_of,
    flipped,
    magnitude,
    percent,
    rank_axes,
    ratio,
    tone,
    total_of,
    ulps_of,
    unjudged_by_reason,
)
from isobit.auditing.report.strip import in_words
from isobit.foundation.plain_text import plain_json
from isobit.report.markup import SHOWN, STYLE, escape, table
from isobit.report.pages import AUDIT_STYLE, write_data, write_document
from isobit.reveal.certificate import OrderComparison
from isobit.reveal.report import draw_certificate

# Tables of an audit's page: axes, operators by their share of the effect, and what was not judged.

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


BODY = """<p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>{sentences}
<h2>What differs</h2>{matrix}
{blame}{strips}{operators}
<h2>What was not judged</h2>{unjudged}
{repeat}"""


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


# One guilty operator in detail: its orders, the first bits that differ, its errors, its remedy.

HEXADECIMAL = re.compile(r"(?:0x)?([0-9a-fA-F]{1,32})")


class OrderPictures:
    """Pictures of orders, each drawn once; operators with equal orders refer to the first."""

    def __init__(self) -> None:
        self.drawn: dict[str, str] = {}  # the classes -> the anchor of the operator

    def show(self, one: Guilty, anchor: str) -> str:
        """Return the pictures of an operator, a reference to equal ones, or why there are none."""
        orders = one.orders
        if isinstance(orders, OrderSummary):
            return f'<ul class="plain">{"".join(f"<li>{escape(t)}" for t in orders.texts)}</ul>'
        if not isinstance(orders, OrderComparison):
            why = one.why_no_order or "it was not revealed"
            return f'<p class="soft">The order of its additions is not shown: {escape(why)}</p>'
        if not orders.classes:
            return self._notes(one, orders)
        key = repr([(c.label, c.tree.digest, c.tree.unlike) for c in orders.classes])
        if key in self.drawn:
            same = f'<a href="#{self.drawn[key]}">the same as drawn here</a>'
            return f"<p>{_orders(orders)}: {same}.</p>{self._notes(one, orders)}"
        self.drawn[key] = anchor
        picture = draw_certificate(orders).replace(f"<style>{STYLE}</style>", "")
        words = "; ".join(f"{found.label}: {found.tree}" for found in orders.classes)
        picture = picture.replace('role="img"', f'role="img" aria-label="{escape(words)}"', 1)
        return (
            f'<p>{_orders(orders)}.</p><div class="wide">{picture}</div>{self._notes(one, orders)}'
        )

    @staticmethod
    def _notes(one: Guilty, orders: OrderComparison) -> str:
        """Return what was said about the orders, and what could not be revealed."""
        notes = [one.why_no_order] if one.why_no_order else []
        notes += [f"{name} could not be revealed: {reason}" for name, reason in orders.refused]
        return "".join(f'<p class="soft">{escape(note)}</p>' for note in notes)


def _orders(orders: OrderComparison) -> str:
    if len(orders.classes) == 1:
        return "One order of additions was found, so the difference comes from elsewhere"
    return (
        f"{len(orders.classes)} orders of additions. Blue additions are made by all of them, "
        "orange ones by one only. They were revealed with other numbers than these, so they do not depend on the input"
    )


def show_operator(
    one: Guilty, axis: AxisReport, anchor: str, pictures: OrderPictures, opened: bool
) -> str:
    """Return the details of one operator."""
    tone = "bad" if one.is_error else "warn"
    share = f"{percent(one.share)} of the effect" if one.share is not None else "share not measured"
    head = (
        f"<summary><b>{escape(str(one.place))}</b>"
        f'<span class="chip {tone}">{escape(one.axis)}: {escape(one.kind)}</span>'
        f'<span class="soft">{share}, {ulps_of(one)} ulp</span></summary>'
    )
    rows = "".join(f"<dt>{name}<dd>{value}" for name, value in facts_of_operator(one, axis))
    return (
        f'<details class="operator {tone}"{" open" if opened else ""}>{head}<div id="{anchor}" class="place">'
        f'<dl class="facts">{rows}</dl>{pictures.show(one, anchor)}</div></details>'
    )


def facts_of_operator(one: Guilty, axis: AxisReport) -> list[tuple[str, str]]:
    """Return names and values, the latter as HTML."""
    facts = [
        ("kind", escape(describe_kind(one))),
        ("elements that differ", f"{one.elements:,} of {one.of:,}, by at most {_size(one)}"),
        ("first difference", show_bits(one, axis.sides)),
        ("errors", escape(errors_of(one, axis.sides))),
        ("substituting it changes", escape(changed(one.effect))),
        ("shapes", _shapes(one, axis.sides)),
        ("source", f"<code>{escape(one.place.source)}</code>" if one.place.source else "not known"),
        ("call", f"{one.place.call:,}{' in the backward pass' if one.place.backward else ''}"),
        ("remedy", escape(one.remedy) or "none is known"),
    ]
    price = "not measured" if one.price is None else _price(one.price)
    return [*facts, ("price", price)]


def _size(one: Guilty) -> str:
    return f"{magnitude(one.largest)} ({ulps_of(one)} ulp)"


def _price(price: float) -> str:
    return f"isobit's operator takes {ratio(price)} times as long at this shape"


def _shapes(one: Guilty, sides: tuple[str, str]) -> str:
    if not any(one.shapes):
        return "not recorded"
    return "<br>".join(
        f'<span class="soft">{escape(side)}:</span> <code>{escape(shape)}</code>'
        for side, shape in zip(sides, one.shapes, strict=True)
    )


def show_bits(one: Guilty, sides: tuple[str, str]) -> str:
    """Return both values of the first element that differs, with the bits that differ marked."""
    first = one.first
    if first is None:
        return "not recorded"
    texts = (first.run_bits, first.variant_bits)
    matches = [HEXADECIMAL.fullmatch(text) for text in texts]
    digits = [found.group(1).lower() for found in matches if found]
    known = len(digits) == 2 and len(digits[0]) == len(digits[1])
    rows = []
    for at, (side, value) in enumerate(zip(sides, (first.run, first.variant), strict=True)):
        shown = f'<td colspan="2"><code>{escape(texts[at])}</code>'
        if known:
            pair = digits[at], digits[1 - at]
            shown = (
                f"<td><code>{_marked(*pair)}</code><td><code>{_marked(*map(_binary, pair))}</code>"
            )
        rows.append(
            f'<tr><td class="soft">{escape(side)}<td class="figure">{_number(value)}{shown}'
        )
    index = f"at {list(first.index)}" if first.index else "a single number"
    apart = f"; {counted(_apart(*digits), 'differing bit')}" if known else ""
    return f'{index}{apart}<table class="bits">{"".join(rows)}</table>'


def _number(value: float) -> str:
    return magnitude(value) if value != value else f"{value:.9g}"


def _apart(left: str, right: str) -> int:
    return (int(left, 16) ^ int(right, 16)).bit_count()


def _binary(digits: str) -> str:
    return " ".join(f"{int(digit, 16):04b}" for digit in digits)


def _marked(text: str, other: str) -> str:
    """Mark the runs of characters that differ from those of another text of the same length."""
    parts = []
    for at, character in enumerate(text):
        differs, before = character != other[at], at > 0 and text[at - 1] != other[at - 1]
        parts.append("<mark>" if differs and not before else "")
        parts.append("</mark>" if before and not differs else "")
        parts.append(character)
    return "".join(parts) + ("</mark>" if text and text[-1] != other[-1] else "")


DETAILED, OPENED = 30, 3  # guilty operators with details, and how many of them are open


def write_audit_page(audit: Audit) -> str:
    """Return an audit as one HTML file that needs no network.

    Args:
        audit: what was found. Its text is escaped; equal records give equal pages.

    Returns:
        The page. Its `<script id="audit">` is data: what `audit_as_json` writes.

    Example:
        >>> from isobit.auditing.records import Audit
        >>> page = write_audit_page(Audit("tiny", "2 samples", axes=()))
        >>> "Nothing was audited, so nothing follows." in page
        True
    """
    chosen = _choose(audit)
    blame, strips, operators = "", "", ""
    if audit.guilty:
        tables = [
            show_blame(
                axis, {at: _anchor(a, at) for at in range(len(axis.guilty)) if (a, at) in chosen}
            )
            for a, axis in enumerate(audit.axes)
            if axis.guilty
        ]
        blame = f"<h2>Who is to blame</h2>{''.join(tables)}"
        strips = f"<h2>Where they are</h2>{audit_strip.legend()}{_strips(audit)}"
        operators = f"<h2>Guilty operators</h2>{_operators(audit, chosen)}"
    record = plain_json(json.dumps(plain_audit(audit), ensure_ascii=False, separators=(",", ":")))
    body = BODY.format(
        about=_about(audit),
        tone=tone(audit),
        conclusion=escape(conclude(audit)),
        sentences=_sentences(audit),
        matrix=show_matrix(audit),
        blame=blame,
        strips=strips,
        operators=operators,
        unjudged=show_unjudged(audit),
        repeat=_repeat(audit),
    )
    return write_document(
        f"Audit of {audit.model}",
        STYLE + AUDIT_STYLE,
        body,
        audit.provenance,
        write_data("audit", record),
    )


def _anchor(axis: int, at: int) -> str:
    return f"operator-{axis}-{at}"


def _choose(audit: Audit) -> list[tuple[int, int]]:
    """Return axis and index of the operators with details: errors first, then by their share."""
    every = [(a, at) for a, axis in enumerate(audit.axes) for at in range(len(axis.guilty))]

    def rank(place: tuple[int, int]) -> tuple[bool, bool, float, tuple[int, int]]:
        one = audit.axes[place[0]].guilty[place[1]]
        return not one.is_error, one.unread, -abs(one.share or 0.0), place

    return sorted(every, key=rank)[:DETAILED]


def _about(audit: Audit) -> str:
    passes = "forward and backward pass" if audit.backward else "forward pass"
    about = f"{escape(audit.inputs)}; {passes}; " if audit.inputs else f"{passes}; "
    axes = "1 axis" if len(audit.axes) == 1 else f"{len(audit.axes)} axes"
    return f"{about}{counted(len(audit.guilty), 'guilty operator')} on {axes}"


def _sentences(audit: Audit) -> str:
    """Return the conclusions on the axes that the page's own conclusion does not begin with."""
    others = audit.axes if audit.kept else rank_axes(audit)[1:]
    items = "".join(
        f"<li><b>{escape(axis.axis)}</b>: {escape(conclude_axis(axis))}" for axis in others
    )
    return f'<ul class="conclusions">{items}</ul>' if len(audit.axes) > 1 else ""


def _strips(audit: Audit) -> str:
    shown = []
    for axis in audit.axes:
        if axis.guilty:
            rows = [
                f'<tr><td class="name">{escape(family)}<td>{escape(layers)}<td>{ulps}<td>{share}'
                for family, layers, ulps, share in in_words(axis)
            ]
            words = table(("operator", "layers", "ulp", "share of the effect"), rows)
            shown.append(
                f"<h3>{escape(axis.axis)}</h3>"
                f'<div class="scroll">{audit_strip.draw_strip(axis)}</div>'
                f"<details><summary>The same as a table</summary>{words}</details>"
            )
    return "".join(shown)


def _operators(audit: Audit, chosen: list[tuple[int, int]]) -> str:
    """Return the details of the chosen operators, and the others as a table."""
    pictures = OrderPictures()
    shown = [
        show_operator(
            audit.axes[a].guilty[at], audit.axes[a], _anchor(a, at), pictures, rank < OPENED
        )
        for rank, (a, at) in enumerate(chosen)
    ]
    taken = set(chosen)
    rest = [
        (one, axis)
        for a, axis in enumerate(audit.axes)
        for at, one in enumerate(axis.guilty)
        if (a, at) not in taken
    ]
    return "".join(shown) + show_rest(rest, show_bits)


def _repeat(audit: Audit) -> str:
    if audit.provenance is None or not audit.provenance.command:
        return '<h2>Repeat it</h2><p class="soft">The command was not recorded.</p>'
    return f"<h2>Repeat it</h2><pre>{escape(audit.provenance.command)}</pre>"
