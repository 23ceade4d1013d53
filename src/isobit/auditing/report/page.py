"""A self-contained HTML page of an audit: the conclusion, the axes, who is to blame, and each guilty operator."""

from __future__ import annotations

import json

from isobit.auditing.records import Audit
from isobit.auditing.report import strip as audit_strip
from isobit.auditing.report.figures import counted
from isobit.auditing.report.json import plain_audit
from isobit.auditing.report.layers import in_words
from isobit.auditing.report.operator import OrderPictures, show_bits, show_operator
from isobit.auditing.report.sentence import conclude, conclude_axis, rank_axes, tone
from isobit.auditing.report.tables import show_blame, show_matrix, show_rest, show_unjudged
from isobit.foundation.plain_text import plain_json
from isobit.report.markup import as_footer, escape, table
from isobit.report.style import fill_page

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
    return fill_page(
        title=escape(f"Audit of {audit.model}"),
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
        origin=as_footer(audit.provenance),
        json=as_data(audit),
    )


def as_data(audit: Audit) -> str:
    """Return the audit as JSON for a script element, which no text in it can end."""
    text = plain_json(json.dumps(plain_audit(audit), ensure_ascii=False, separators=(",", ":")))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


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
