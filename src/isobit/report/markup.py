"""Escaped text for pages and pictures, and their provenance as a footer or metadata."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isobit.errors import ArgumentError
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


# A small SVG writer: lines, bars, dots and text, with classes for a style sheet.

# For light and dark pages. Blue: in all orders; violet: in some; orange: in one only.
STYLE = """
text{font:12px ui-sans-serif,system-ui,sans-serif;fill:#30353d}
.quiet{fill:#6b7280;font-size:11px}.title{font-size:14px;font-weight:600}
.same{stroke:#4f7cac}.shared{stroke:#8a6fb5}.differs{stroke:#d9631e}.axis{stroke:#c5cad3}
.same-fill{fill:#4f7cac}.shared-fill{fill:#8a6fb5}.differs-fill{fill:#d9631e}.panel{fill:#fbfbfc;stroke:#e3e6eb}
line,path{fill:none;stroke-width:1.6}.bar{stroke-width:7;stroke-linecap:butt}.hair{stroke-width:1}
@media (prefers-color-scheme:dark){text{fill:#d7dbe2}.quiet{fill:#9aa3b2}.panel{fill:#1b1f27;stroke:#343b47}
.same{stroke:#7fb0e3}.shared{stroke:#b79be3}.differs{stroke:#f08a4b}.same-fill{fill:#7fb0e3}.shared-fill{fill:#b79be3}
.differs-fill{fill:#f08a4b}.axis{stroke:#4a5160}}
"""
# A browser shows a picture on white, also to readers who prefer dark pages.
GROUND = """svg:root{background:#fff}
@media (prefers-color-scheme:dark){svg:root{background:#14171d}}
"""


class Canvas:
    """Elements in drawing order; y grows downward."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str, title: str = "") -> None:
        """Draw a straight line."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        ends = f'x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
        self.parts.append(f'<line {ends} class="{kind}">{tip}</line>')

    def dot(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        """Draw a filled circle."""
        tip = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}-fill">{tip}</circle>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Draw one line of text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def panel(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a frame behind what follows."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" class="panel"/>'
        )

    def place(self, other: Canvas, x: float, y: float) -> None:
        """Draw another canvas at an offset."""
        self.parts.append(
            f'<g transform="translate({x:.1f},{y:.1f})">' + "".join(other.parts) + "</g>"
        )

    def document(
        self,
        width: float,
        height: float,
        origin: Provenance | None = None,
        *,
        is_page: bool = False,
    ) -> str:
        """Return the whole picture; one that is opened by itself, as a page, has a background of its own."""
        style = STYLE + GROUND if is_page else STYLE
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">{as_metadata(origin)}'
            f"<style>{style}</style>{''.join(self.parts)}</svg>"
        )


# The form in which a report is saved, by the suffix of the file.

Writer = Callable[[Any], str]


def writer_of(path: str | os.PathLike[str], writers: Mapping[str, Writer]) -> Writer:
    """Return the writer of a file's suffix; raise ArgumentError if there is none.

    Example:
        >>> writer_of("page.txt", {".txt": str})(3)
        '3'
    """
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix not in writers:
        raise ArgumentError(
            expected=f"a file name that ends in {', '.join(writers)}",
            received=os.fspath(path),
            remedy="choose one of these suffixes",
        )
    return writers[suffix]
