"""One guilty operator in detail: its orders, the first bits that differ, its errors, its remedy."""

from __future__ import annotations

import re

from isobit.auditing.records import AxisReport, Guilty
from isobit.auditing.report.figures import (
    changed,
    counted,
    describe_kind,
    errors_of,
    magnitude,
    percent,
    ratio,
    ulps_of,
)
from isobit.auditing.report.json import OrderSummary
from isobit.report.markup import escape
from isobit.report.svg import STYLE
from isobit.reveal.certificate import OrderComparison
from isobit.reveal.report import draw_certificate

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
