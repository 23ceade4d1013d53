"""The report of a preflight as a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isobit.foundation.records import Provenance
from isobit.guards.trial_run.report import ConfigurationReport, PreflightFinding, PreflightReport
from isobit.report.markup import escape
from isobit.report.pages import BASE_STYLE, write_document

STYLE = """
td,th{white-space:nowrap;overflow-wrap:normal}
td:last-child{white-space:normal;overflow-wrap:anywhere;width:100%;min-width:14rem}td.number{width:auto}
@media (max-width:640px){td:first-child{white-space:normal}.found tr:first-child{display:none}
.found tr{display:flex;flex-wrap:wrap;border-bottom:1px solid #8884}.found td{border:0;padding-bottom:.1rem}
.found td:last-child{flex-basis:100%;min-width:0;padding-bottom:.35rem}
.found td.step:not(:empty)::before{content:"step "}
.found td.ranks:not(:empty)::before{content:"rank "}}
"""
BODY = """<p class="verdict {tone}">{verdict}</p>
<h2>What was found</h2>{findings}{notes}
<h2>What was checked</h2><table>{checks}</table>
{dtypes}"""
TONES = {"error": "bad", "warning": "warn"}


def write_preflight_page(
    name: str,
    report: PreflightReport | ConfigurationReport,
    origin: Provenance | None = None,
) -> str:
    """Return the page of one preflight.

    Args:
        name: The script.
        report: What was found.
        origin: Where the page comes from.
    """
    body = BODY.format(
        tone="bad" if report.findings else "mute" if report.not_judged else "good",
        verdict=escape(report.headline),
        findings=write_findings(report.findings),
        notes="".join(f"<p>{escape(note.message)}</p>" for note in report.notes),
        checks=write_checks(report.judged, report.not_judged),
        dtypes=write_dtypes(report.dtypes),
    )
    return write_document(
        f"Preflight of {name}",
        BASE_STYLE + STYLE,
        body,
        origin,
    )


def write_findings(findings: Sequence[PreflightFinding]) -> str:
    """Return the table of findings, errors first."""
    if not findings:
        return "<p>Nothing.</p>"
    has_ranks = any(one.ranks for one in findings)
    rows = "".join(
        f'<tr><td><code>{escape(one.rule)}</code><td class="{TONES.get(one.severity, "mute")}">'
        f'{escape(one.severity)}<td class="step">{one.in_steps}'
        + (f'<td class="ranks">{", ".join(map(str, one.ranks))}' if has_ranks else "")
        + f"<td>{escape(f'{one.module}: ' if one.module else '')}{escape(one.message)}"
        for one in sorted(findings, key=lambda one: one.severity)
    )
    head = f"<tr><th>rule<th>severity<th>step{'<th>ranks' if has_ranks else ''}<th>found"
    return f'<div class="wide"><table class="found">{head}{rows}</table></div>'


def write_checks(judged: Sequence[str], skipped: Mapping[str, str]) -> str:
    """Return the rows of the checks that were made, and of those that were not, with the reason."""
    made = "".join(f'<tr><td>{escape(name)}<td class="good">made' for name in judged)
    return made + "".join(
        f'<tr><td>{escape(name)}<td class="mute">not made: {escape(reason)}'
        for name, reason in skipped.items()
    )


def write_dtypes(dtypes: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table of dtypes: calls by class of module."""
    if not dtypes:
        return ""
    kinds = sorted({dtype for counts in dtypes.values() for dtype in counts})
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>"
        + "".join(f'<td class="number">{counts.get(kind, 0):,}' for kind in kinds)
        for name, counts in sorted(dtypes.items())
    )
    head = "".join(f"<th>{escape(kind)}" for kind in kinds)
    return (
        '<h2>Dtypes</h2><p class="mute">Calls in training, by module and dtype of the output.</p>'
        f'<div class="wide"><table><tr><th>module{head}{rows}</table></div>'
    )
