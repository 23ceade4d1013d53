"""The frame that pages of findings share, and its parts: cards of findings, strips of ranks, tables, printed text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isobit.foundation.records import Provenance
from isobit.report.markup import FOOTER_STYLE, as_footer, escape

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--good:#237a4b;--bad:#b3261e;--calm:#3b6ea8;--mute:#6b7280;--card:#8881}}
@media (prefers-color-scheme:dark){{:root{{--good:#5cc08a;--bad:#f2837b;--calm:#7fb2ea;--mute:#9aa3b2}}}}
body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem;margin-bottom:.2rem}}h2{{font-size:1.1rem;margin:2rem 0 .5rem}}.verdict{{font-size:1.1rem}}
h3{{font-size:1rem;margin:0 0 .3rem}}h3 small{{font-weight:400;color:var(--mute)}}
.good{{color:var(--good)}}.bad{{color:var(--bad)}}.calm{{color:var(--calm)}}.mute{{color:var(--mute)}}
.card{{background:var(--card);border-left:3px solid var(--bad);padding:.7rem 1rem;margin:.7rem 0;border-radius:3px}}
.card.follows{{border-left-color:var(--mute)}}dl{{display:grid;grid-template-columns:max-content 1fr;
gap:.15rem 1rem;margin:.4rem 0 0}}dt{{color:var(--mute)}}dd{{margin:0;overflow-wrap:anywhere}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.35rem .8rem .35rem 0;vertical-align:top;
border-bottom:1px solid #8884;overflow-wrap:anywhere}}th{{font-weight:500;color:var(--mute);white-space:nowrap}}
td.ranks-of{{white-space:nowrap;width:10rem}}code,pre{{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}}
pre{{background:var(--card);padding:.7rem 1rem;overflow-x:auto;border-radius:3px}}.wide{{overflow-x:auto}}
.ranks{{display:flex;flex-wrap:wrap;gap:3px;margin:.25rem 0}}.ranks span{{min-width:1.6rem;padding:0 .25rem;
text-align:center;font-size:12px;border:1px solid #8886;border-radius:3px;color:var(--mute);
font-variant-numeric:tabular-nums}}
.ranks .bad{{background:var(--bad);border-color:var(--bad);color:#fff}}
.ranks .calm{{border-color:var(--calm);color:var(--calm)}}
{footer_style}</style>
<h1>{title}</h1><p class="verdict {tone}">{verdict}</p>
{body}{origin}</html>
"""
MOST_RANKS = 512  # drawn in one strip
MOST_PRINTED = 4000  # characters of a program's output
MOST_SHOWN = 64  # rows of a table, and places of a finding


def write_frame(
    title: str, tone: str, verdict: str, body: str, origin: Provenance | None = None
) -> str:
    """Return a page; `body` is HTML, the other words are escaped here."""
    return PAGE.format(
        title=escape(title),
        tone=tone,
        verdict=escape(verdict),
        body=body,
        origin=as_footer(origin),
        footer_style=FOOTER_STYLE,
    )


def write_ranks(ranks: Iterable[int], bad: Collection[int], calm: Collection[int] = ()) -> str:
    """Draw ranks as a strip: those to blame filled, those of `calm` outlined."""
    every = sorted(ranks)
    boxes = "".join(
        f'<span class="{"bad" if rank in bad else "calm" if rank in calm else ""}">{rank}</span>'
        for rank in every[:MOST_RANKS]
    )
    left = f"<span>+{len(every) - MOST_RANKS}</span>" if len(every) > MOST_RANKS else ""
    return f'<div class="ranks">{boxes}{left}</div>'


def write_card(title: str, about: str, inside: str, follows: bool = False) -> str:
    """Draw a finding; `inside` is HTML."""
    kind = "card follows" if follows else "card"
    small = f" <small>{escape(about)}</small>" if about else ""
    return f'<div class="{kind}"><h3>{escape(title)}{small}</h3>{inside}</div>'


def write_facts(facts: Mapping[str, str]) -> str:
    """Draw names and values as a list, without those that are empty."""
    items = "".join(
        f"<dt>{escape(name)}<dd>{escape(value)}" for name, value in facts.items() if value
    )
    return f"<dl>{items}</dl>" if items else ""


def write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Draw a table of plain words."""
    shown = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows[:MOST_SHOWN]
    )
    more = (
        f'<p class="mute">and {len(rows) - MOST_SHOWN} more</p>' if len(rows) > MOST_SHOWN else ""
    )
    top = "".join(f"<th>{escape(name)}" for name in head)
    return f'<div class="wide"><table><tr>{top}{shown}</table></div>{more}'


def write_places(stacks: Mapping[str, Sequence[str]], frames: int = 4) -> str:
    """Draw where ranks were, those at one place together."""
    places: dict[tuple[str, ...], list[str]] = {}
    for rank, lines in stacks.items():
        if lines:
            places.setdefault(tuple(lines[:frames]), []).append(rank)
    rows = "".join(
        f'<tr><td class="ranks-of">{escape(shortened(ranks))}'
        f"<td><code>{'<br>'.join(map(escape, lines))}</code>"
        for lines, ranks in list(places.items())[:MOST_SHOWN]
    )
    return f"<table><tr><th>ranks<th>where, innermost first{rows}</table>" if rows else ""


def shortened(ranks: Sequence[str], most: int = 8) -> str:
    """Return ranks in words, the first of them if there are many."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(ranks[:most]) + more


def write_printed(text: str) -> str:
    """Draw what a program printed, its end if it is long."""
    cut = "…" + text[-MOST_PRINTED:] if len(text) > MOST_PRINTED else text
    return f"<pre>{escape_lines(cut.rstrip())}</pre>"


def escape_lines(text: str) -> str:
    """Escape text and keep its lines."""
    return "\n".join(map(escape, text.splitlines()))


def sentences_of(text: str) -> dict[str, str]:
    """Split an error on one line into what was expected, what was received and the remedy."""
    expected, found, rest = text.partition("; received ")
    received, remedied, remedy = rest.rpartition("; remedy: ")
    if not found or not remedied:
        return {"found": text}
    return {
        "expected": expected.removeprefix("expected "),
        "received": received,
        "remedy": remedy,
    }
