"""Escaped text for pages and pictures, and their provenance as a footer or metadata."""

from __future__ import annotations

import html
from collections.abc import Sequence

from isobit.foundation.plain_text import plain
from isobit.foundation.records import Provenance

SHOWN = 30  # rows of a table that are visible before it is unfolded


def escape(text: str) -> str:
    """Escape text for HTML, SVG and XML, also in a quoted attribute."""
    return html.escape(plain(text))


def tone_of(verdict: str) -> str:
    """Return a class of colours: green for kept, grey for undecided, red for what went wrong."""
    if verdict in ("could-not-run", "not-judged", "below-level", "unbound"):
        return "mute"
    return {"kept": "good", "waived": "warn"}.get(verdict, "bad")


def facts_of(origin: Provenance) -> tuple[tuple[str, str], ...]:
    """Return names and values of a provenance, as pages show them."""
    return (
        ("command", origin.command),
        ("date", origin.date),
        ("isobit", origin.isobit),
        ("torch", f"{origin.torch}, Python {origin.python}"),
        ("machine", f"{origin.cpu}; {origin.engine}"),
        ("digest", origin.digest),
    )


def as_footer(origin: Provenance | None) -> str:
    """Write the provenance as a list at the end of a page."""
    if origin is None:
        return ""
    items = "".join(
        f"<dt>{name}<dd><code>{escape(value)}</code>" for name, value in facts_of(origin)
    )
    return f'<footer><h2>Where this page comes from</h2><dl class="origin">{items}</dl></footer>'


def as_metadata(origin: Provenance | None) -> str:
    """Write the provenance as an SVG element that is not drawn."""
    if origin is None:
        return ""
    return (
        "<metadata>"
        + escape("; ".join(f"{name}: {value}" for name, value in facts_of(origin)))
        + "</metadata>"
    )


FOOTER_STYLE = (
    "footer{margin-top:2.5rem;border-top:1px solid #8884;font-size:.85rem}"
    "footer h2{font-size:.95rem;margin:.8rem 0 .4rem}"
    ".origin{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0}"
    ".origin dt{opacity:.7}.origin dd{margin:0;overflow-wrap:anywhere}"
)


def table(heads: Sequence[str], rows: Sequence[str], shown: int = SHOWN) -> str:
    """Return a table; the rows after the first ones are folded away."""
    head = f"<tr>{''.join(f'<th>{name}' for name in heads)}</tr>"
    text = f'<div class="wide"><table>{head}{"".join(rows[:shown])}</table></div>'
    if len(rows) > shown:
        rest = f'<div class="wide"><table>{head}{"".join(rows[shown:])}</table></div>'
        text += f"<details><summary>{len(rows) - shown:,} more</summary>{rest}</details>"
    return text
