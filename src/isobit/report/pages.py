"""What HTML pages share: the document, style sheets, and the parts of pages of findings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isobit.foundation.records import Provenance
from isobit.report.markup import FOOTER_STYLE, as_footer, escape

# Every page is one document without other files: a title, a style sheet for light and dark, a body and its provenance.

DOCUMENT = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<h1>{title}</h1>{body}{origin}{data}</html>
"""
BASE_STYLE = """
:root{color-scheme:light dark;--good:#237a4b;--bad:#b3261e;--warn:#a1470c;--calm:#3b6ea8;--mute:#6b7280;--card:#8881}
@media (prefers-color-scheme:dark){:root{--good:#5cc08a;--bad:#f2837b;--warn:#f08a4b;--calm:#7fb2ea;--mute:#9aa3b2}}
body{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
.verdict{font-size:1.1rem}.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.35rem .8rem .35rem 0;vertical-align:top;
border-bottom:1px solid #8884;overflow-wrap:anywhere}th{font-weight:500;color:var(--mute)}
td.number{font-variant-numeric:tabular-nums}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.calm{color:var(--calm)}.mute{color:var(--mute)}
code,pre{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
"""


def write_document(
    title: str, style: str, body: str, origin: Provenance | None = None, data: str = ""
) -> str:
    """Return a self-contained HTML page. The title is escaped here; `body` and `data` are HTML."""
    return DOCUMENT.format(
        title=escape(title),
        style=style + FOOTER_STYLE,
        body=body,
        origin=as_footer(origin),
        data=data,
    )


def write_data(name: str, record: str) -> str:
    """Return JSON in a script element, which no text in it can end."""
    for character in "<>&":
        record = record.replace(character, f"\\u{ord(character):04x}")
    return f'\n<script type="application/json" id="{name}">{record}</script>\n'


# The style sheet of audits and certificates.

# The pictures of orders bring classes of their own: quiet, title, panel, bar and others mean what they say there.
AUDIT_STYLE = """
:root{color-scheme:light dark;--ink:#20252d;--soft:#5d6675;--line:#dfe3e9;--ground:#f7f8fa;--card:#fff;
--good:#237a4b;--warn:#a1470c;--mute:#6b7280;--bad:#b3261e;--link:#2f5f98;--mark:#ffd9bd;--share:#d9631e;
--u0:#f6cfae;--u1:#efae7d;--u2:#e48c4d;--u3:#cd6826;--u4:#9c4712;--u5:#612807;--nan:#8a6fb5}
@media (prefers-color-scheme:dark){:root{--ink:#dde1e8;--soft:#a1aab9;--line:#343b47;--ground:#1b1f27;--card:#14171d;
--good:#5cc08a;--warn:#f08a4b;--mute:#9aa3b2;--bad:#f2837b;--link:#8db9ee;--mark:#7a3f1c;--share:#f08a4b;
--u0:#573524;--u1:#7a4624;--u2:#9c5422;--u3:#cc6f30;--u4:#f0995f;--u5:#ffd1b0;--nan:#b79be3}}
body{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:1180px;margin:2rem auto;padding:0 1rem;
color:var(--ink);background:var(--card)}
h1{font-size:1.5rem;margin:0 0 .2rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2.4rem 0 .5rem}
h3{font-size:.95rem;margin:1.4rem 0 .3rem}a{color:var(--link)}p{margin:.35rem 0}
code,pre{font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
pre{background:var(--ground);border:1px solid var(--line);border-radius:6px;padding:.5rem .7rem;white-space:pre-wrap}
.soft{color:var(--soft)}p.soft,td.soft,span.soft{font-size:.88rem}
.good{--tone:var(--good)}.warn{--tone:var(--warn)}.mute{--tone:var(--mute)}.bad{--tone:var(--bad)}
.conclusion{font-size:1.15rem;border-left:4px solid var(--tone);background:var(--ground);border-radius:0 8px 8px 0;
padding:.7rem 1rem;margin:1rem 0;overflow-wrap:anywhere}
.conclusions{padding-left:1.1rem;margin:.5rem 0}.conclusions li{margin:.2rem 0;overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;margin-bottom:.9rem}
th,.nowrap{white-space:nowrap}
td,th{text-align:left;padding:.35rem .9rem .35rem 0;vertical-align:top}tr{border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;font-size:.82rem;vertical-align:bottom}td.name{overflow-wrap:anywhere;min-width:13rem}
.axis-name{min-width:11rem}.reason{overflow-wrap:anywhere}tr:has(+tr>.reason){border-bottom:0}
.figure{white-space:nowrap;font-variant-numeric:tabular-nums}
.chip{display:inline-block;color:var(--tone);border:1px solid currentColor;border-radius:99px;padding:0 .6rem;
font-size:.8rem;line-height:1.4rem;font-weight:600;
background:color-mix(in srgb,var(--tone) 10%,transparent)}
.amount{display:inline-block;width:90px;height:9px;border-radius:3px;background:var(--line);margin-right:.5rem}
.amount i{display:block;height:9px;border-radius:3px;background:var(--share)}
summary{cursor:pointer}
details.operator{border:1px solid var(--line);border-left:4px solid var(--tone);border-radius:8px;
margin:.6rem 0;padding:.5rem .9rem}
details.operator>summary{overflow-wrap:anywhere}details.operator>summary>*{margin-right:.7rem}
.place{scroll-margin-top:5rem;padding-top:.4rem}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:.3rem 0 .8rem}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere;min-width:0}
.bits{width:auto;margin:0}.bits tr{border:0}.bits td{padding:.1rem .9rem .1rem 0}.bits code{overflow-wrap:normal}
mark{background:var(--mark);color:inherit;border-radius:2px;font-weight:700}
.plain{padding-left:1.1rem;overflow-wrap:anywhere}svg{max-width:100%;height:auto}
.scroll{overflow-x:auto;width:fit-content;max-width:100%;box-sizing:border-box;
border:1px solid var(--line);border-radius:8px;background:var(--ground);padding:.4rem}
.strip{max-width:none;vertical-align:middle}
.strip text{font:12px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}
.strip text.tiny{font-size:10px;fill:var(--soft)}
.strip text.soft,.strip .soft{fill:var(--soft);font-size:11px}.strip .rule{stroke:var(--line);stroke-width:1;fill:none}
.strip .wrong{stroke:var(--bad);stroke-width:2.5}.strip .chance{stroke:var(--nan);stroke-width:2.5}
.strip .u0{fill:var(--u0)}.strip .u1{fill:var(--u1)}.strip .u2{fill:var(--u2)}.strip .u3{fill:var(--u3)}
.strip .u4{fill:var(--u4)}.strip .u5{fill:var(--u5)}.strip .nan{fill:var(--nan)}
.strip .open{fill:none;stroke:var(--mute);stroke-width:1.2;stroke-dasharray:2 2}
.strip .ring{fill:none;stroke:var(--ink);stroke-width:1.8;pointer-events:none}
.legend{font-size:.85rem;color:var(--soft);display:flex;flex-wrap:wrap;gap:.2rem .9rem;align-items:center}
.legend span{white-space:nowrap}
@media (max-width:640px){.facts{grid-template-columns:1fr}.facts dd{margin-bottom:.4rem}}
"""

# Pages of findings, and their parts: cards of findings, strips of ranks, tables, printed text.

FINDINGS_STYLE = """
h3{font-size:1rem;margin:0 0 .3rem}h3 small{font-weight:400;color:var(--mute)}
.card{background:var(--card);border-left:3px solid var(--bad);padding:.7rem 1rem;margin:.7rem 0;border-radius:3px}
.card.follows{border-left-color:var(--mute)}dl{display:grid;grid-template-columns:max-content 1fr;
gap:.15rem 1rem;margin:.4rem 0 0}dt{color:var(--mute)}dd{margin:0;overflow-wrap:anywhere}
th,td.ranks-of{white-space:nowrap}td.ranks-of{width:10rem}
pre{background:var(--card);padding:.7rem 1rem;overflow-x:auto;border-radius:3px}
.ranks{display:flex;flex-wrap:wrap;gap:3px;margin:.25rem 0}.ranks span{min-width:1.6rem;padding:0 .25rem;
text-align:center;font-size:12px;border:1px solid #8886;border-radius:3px;color:var(--mute);
font-variant-numeric:tabular-nums}
.ranks .bad{background:var(--bad);border-color:var(--bad);color:#fff}
.ranks .calm{border-color:var(--calm);color:var(--calm)}
"""
MOST_RANKS = 512  # drawn in one strip
MOST_PRINTED = 4000  # characters of a program's output
MOST_SHOWN = 64  # rows of a table, and places of a finding


def write_frame(
    title: str, tone: str, verdict: str, body: str, origin: Provenance | None = None
) -> str:
    """Return a page; `body` is HTML, the other words are escaped here."""
    shown = f'<p class="verdict {tone}">{escape(verdict)}</p>\n{body}'
    return write_document(title, BASE_STYLE + FINDINGS_STYLE, shown, origin)


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
