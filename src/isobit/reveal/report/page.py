"""A certificate as one picture of its orders side by side, and as a self-contained HTML page."""

from __future__ import annotations

from isobit.foundation.records import Provenance
from isobit.order.addition import step_digests, steps_of
from isobit.report.markup import FOOTER_STYLE, as_footer, escape
from isobit.report.svg import Canvas
from isobit.reveal.certificate import OrderClass, OrderComparison
from isobit.reveal.report.picture import WIDTH, OrderPicture

GAP, HEAD = 16, 62
WORDS_A_LINE = 86

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem;margin-bottom:.2rem}}.verdict{{font-size:1.1rem}}
table{{border-collapse:collapse;margin:1rem 0}}
td,th{{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid #8884;vertical-align:top}}
svg{{max-width:100%;height:auto}}.note{{color:#777}}.wide{{overflow-x:auto}}.wide table{{min-width:50rem}}
{footer_style}</style>
<h1>{title}</h1><p class="verdict">{verdict}</p><p class="note">{legend}</p>{picture}{table}{refused}
{origin}</html>
"""
LEGEND = (
    "Terms run along the horizontal axis; a bar is a chain of neighbours, dots on a line a chain of separate "
    "terms, a junction an addition. Blue: every order here makes this addition; violet: some others do; orange: none."
)
COLUMNS = (
    "configurations",
    "order",
    "arithmetic",
    "differs from the first",
    "digest",
    "probes, replayed",
)


def draw_certificate(
    certificate: OrderComparison, title: str = "", origin: Provenance | None = None
) -> str:
    """Draw every class of configurations in its own panel."""
    made = [set(step_digests(steps_of(c.tree.branch))) for c in certificate.classes]
    pictures = [
        OrderPicture(c.tree, [other for other in made if other is not made[at]])
        for at, c in enumerate(certificate.classes)
    ]
    columns = 1 if len(pictures) == 1 else 2
    whole = Canvas()
    y = 30.0 if title else 6.0
    if title:
        whole.text(6, 19, title, "title")
    for at in range(0, len(pictures), columns):
        row = pictures[at : at + columns]
        height = max(p.height for p in row) + HEAD
        for column, picture in enumerate(row):
            x = 4 + column * (WIDTH + GAP)
            whole.panel(x, y, WIDTH, height)
            _head(whole, certificate.classes[at + column], x + 12, y + 20)
            whole.place(picture.canvas, x, y + height - picture.height)
        y += height + GAP
    return whole.document(8 + columns * WIDTH + (columns - 1) * GAP, y, origin)


def _head(canvas: Canvas, found: OrderClass, x: float, y: float) -> None:
    canvas.text(x, y, _cut(found.label, 70), "title")
    canvas.text(x, y + 17, _cut(str(found.tree), WORDS_A_LINE))
    canvas.text(
        x, y + 33, _cut(str(found.tree.arithmetic or "arithmetic not seen"), WORDS_A_LINE), "quiet"
    )


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "…"


def write_page(certificate: OrderComparison, title: str, origin: Provenance | None = None) -> str:
    """Return the page: picture, legend, and numbers."""
    verdict = (
        f"One order in {certificate.count} configurations: {certificate.claim}."
        if certificate.kept
        else f"{len(certificate.classes)} orders in {certificate.count} configurations."
    )
    rows = "".join(_row(found) for found in certificate.classes)
    heads = "".join(f"<th>{name}" for name in COLUMNS)
    table = f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>'
    refused = "".join(
        f"<p><b>{escape(found.label)}</b>: {found.tree.unlike} places of a call add in another order still.</p>"
        for found in certificate.classes
        if found.tree.unlike
    )
    refused += "".join(
        f"<p><b>{escape(name)}</b> could not be shown: {escape(reason)}</p>"
        for name, reason in certificate.refused
    )
    picture = draw_certificate(certificate) if certificate.classes else ""
    return PAGE.format(
        title=escape(title),
        verdict=escape(verdict),
        picture=picture,
        table=table,
        refused=refused,
        legend=LEGEND,
        origin=as_footer(origin),
        footer_style=FOOTER_STYLE,
    )


def _row(found: OrderClass) -> str:
    difference = f"{found.parting[0]} there; {found.parting[1]} here" if found.parting else ""
    cells = (
        found.label,
        str(found.tree),
        str(found.tree.arithmetic or "not seen"),
        difference,
        found.tree.digest[:16],
        f"{found.tree.probes}, {found.tree.replayed}",
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
