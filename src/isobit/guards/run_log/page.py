"""The verdict on logs of training runs as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.markup import FOOTER_STYLE, as_footer, escape

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--good:#237a4b;--bad:#b3261e;--warn:#a1470c;--mute:#6b7280}}
@media (prefers-color-scheme:dark){{:root{{--good:#5cc08a;--bad:#f2837b;--warn:#f08a4b;--mute:#9aa3b2}}}}
body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem;margin-bottom:.2rem}}h2{{font-size:1.1rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.35rem .8rem .35rem 0;vertical-align:top;
border-bottom:1px solid #8884;overflow-wrap:break-word}}th{{font-weight:500;color:var(--mute);white-space:nowrap}}
.good{{color:var(--good)}}.bad{{color:var(--bad)}}.warn{{color:var(--warn)}}.mute{{color:var(--mute)}}
.wide{{overflow-x:auto}}.wide svg{{max-width:100%;height:auto}}td.number{{font-variant-numeric:tabular-nums}}
td:nth-child(n+5){{min-width:14rem}}
code{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:nowrap}}
{footer_style}</style>
<h1>{title}</h1>{sections}{origin}</html>
"""
TONES = {"error": "bad", "warning": "warn"}


@dataclass(frozen=True)
class Section:
    """One log, or one comparison of two.

    Attributes:
        title: What was judged.
        tone: "good", "warn" or "bad".
        verdict: The sentence of the verdict.
        findings: As dictionaries, in the order of their numbers.
        not_judged: Rules that were not judged, with the reason.
        picture: SVG.
    """

    title: str
    tone: str
    verdict: str
    findings: Sequence[Mapping[str, Any]]
    not_judged: Mapping[str, str]
    picture: str


def write_run_page(
    title: str, sections: Sequence[Section], origin: Provenance | None = None
) -> str:
    """Return the page.

    Args:
        title: The first line.
        sections: What was judged, one after the other.
        origin: Where the page comes from.
    """
    return PAGE.format(
        title=escape(title),
        sections="".join(map(write_section, sections)),
        origin=as_footer(origin),
        footer_style=FOOTER_STYLE,
    )


def write_section(section: Section) -> str:
    """Return one log: verdict, findings with their numbers, what was not judged, and the picture."""
    rows = "".join(
        f'<tr><td class="number">{number}<td class="number">{one["step"]}<td><code>{escape(str(one["rule"]))}</code>'
        f'<td class="{TONES.get(str(one["severity"]), "mute")}">{escape(str(one["severity"]))}'
        f"<td>{escape(str(one['message']))}<td>{escape(str(one['causes']))}"
        for number, one in enumerate(section.findings, 1)
    )
    head = "<tr><th>no.<th>step<th>rule<th>severity<th>found<th>likely causes"
    found = (
        f'<div class="wide"><table>{head}{rows}</table></div>'
        if rows
        else "<p>Nothing was found.</p>"
    )
    skipped = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(reason)}"
        for name, reason in section.not_judged.items()
    )
    left = f"<h3>Not judged</h3><table>{skipped}</table>" if skipped else ""
    return (
        f'<h2>{escape(section.title)}</h2><p class="{section.tone}">{escape(section.verdict)}</p>'
        f'{found}<div class="wide">{section.picture}</div>{left}'
    )
