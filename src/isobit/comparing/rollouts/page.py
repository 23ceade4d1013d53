"""A comparison of rollout and trainer as a self-contained HTML page."""

from __future__ import annotations

from isobit.comparing.rollouts.records import CLASSES, Finding, RolloutReport
from isobit.foundation.records import Provenance
from isobit.report.markup import FOOTER_STYLE, as_footer, escape

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root{{color-scheme:light dark;--good:#237a4b;--bad:#b3261e;--mute:#6b7280}}
@media (prefers-color-scheme:dark){{:root{{--good:#5cc08a;--bad:#f2837b;--mute:#9aa3b2}}}}
body{{font:15px/1.5 ui-sans-serif,system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem}}
h1{{font-size:1.5rem;margin-bottom:.2rem}}h2{{font-size:1.1rem;margin:2rem 0 .5rem}}.verdict{{font-size:1.1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.35rem .8rem .35rem 0;vertical-align:top;
border-bottom:1px solid #8884;overflow-wrap:anywhere}}th{{font-weight:500;color:var(--mute)}}
.good{{color:var(--good)}}.bad{{color:var(--bad)}}.mute{{color:var(--mute)}}.wide{{overflow-x:auto}}
.steps{{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:.7rem;padding:0;list-style:none}}
.steps li{{border:1px solid #8884;border-left:4px solid currentColor;border-radius:8px;padding:.5rem .8rem}}
.steps b{{display:block}}.steps span{{color:CanvasText}}
code{{font:13px ui-monospace,Menlo,Consolas,monospace}}td.number{{text-align:right;font-variant-numeric:tabular-nums}}
{footer_style}</style>
<h1>{title}</h1><p class="verdict {tone}">{verdict}</p>
<ol class="steps">{steps}</ol>
<h2>What differs</h2>{findings}
<h2>Metrics</h2><p class="mute">Under the names that RL frameworks log.</p><div class="wide">{metrics}</div>
{notes}{origin}</html>
"""
QUESTIONS = {
    "semantics": "Do both sides compute the same quantity? Ids, shift, mask, positions, temperature, truncation, "
    "normaliser.",
    "weights": "Do both compute it with the same weights? Digests per row.",
    "numerics": "Do they compute it in the same arithmetic? Bits of log-probabilities and full rows.",
}


def write_rollout_page(
    found: RolloutReport, names: tuple[str, str], origin: Provenance | None = None
) -> str:
    """Return the page of one comparison; `names` are those of rollout and trainer."""
    notes = "".join(f"<li>{escape(note)}" for note in found.notes)
    return PAGE.format(
        title=escape(f"Rollout {names[0]} and trainer {names[1]}"),
        tone=("good", "bad", "mute")[found.exit_code],
        verdict=escape(found.sentence),
        steps="".join(write_step(found, cause) for cause in QUESTIONS),
        findings=write_findings(found.findings),
        metrics=write_metrics(found.metrics),
        notes=f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        origin=as_footer(origin),
        footer_style=FOOTER_STYLE,
    )


def write_step(found: RolloutReport, cause: str) -> str:
    """Return the box of one class: differs, equal, or not judged."""
    count = sum(one.cause == cause for one in found.findings)
    earlier = {one.cause for one in found.findings} & set(CLASSES[: CLASSES.index(cause)])
    unknown = (
        (cause == "weights" and not found.tensors)
        or (cause == "numerics" and (earlier or found.cause == "undetermined"))
        or not found.tokens
    )
    if count:
        tone, word = "bad", f"{count} {'finding' if count == 1 else 'findings'}"
    elif unknown:
        tone, word = "mute", "not judged"
    else:
        tone, word = "good", "equal"
    return f'<li class="{tone}"><b>{cause}: {word}</b><span>{escape(QUESTIONS[cause])}</span>'


def write_findings(findings: tuple[Finding, ...]) -> str:
    """Return the table of findings, the cause first."""
    if not findings:
        return "<p>Nothing.</p>"
    rows = "".join(
        f"<tr><td>{escape(one.cause)}<td>{escape(one.kind)}<td>{escape(one.detail)}"
        f"<br><span class='mute'>{escape(one.first)}</span><br>{escape(one.remedy)}"
        f"<td class='number'>{one.differ:,} of {one.of:,}"
        for one in findings
    )
    return (
        '<div class="wide"><table><tr><th>class<th>kind<th>what, the first, and what to do<th>differ'
        f"{rows}</table></div>"
    )


def write_metrics(metrics: dict[str, float]) -> str:
    """Return the table of metrics."""
    if not metrics:
        return "<p>None: no token was compared.</p>"
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td class='number'>{value:.6g}"
        for name, value in metrics.items()
    )
    return f"<table><tr><th>metric<th>value{rows}</table>"
