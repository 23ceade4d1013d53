"""An audit of a server as a self-contained HTML page."""

from __future__ import annotations

from isobit.comparing.server.records import AXES, ServerAudit, Variant
from isobit.foundation.records import to_json
from isobit.report.markup import FOOTER_STYLE, as_footer, escape, tone_of
from isobit.report.style import STYLE

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<h1>{title}</h1><p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>
<h2>What differs</h2>{table}
<h2>Which prompts</h2>{grid}
<h2>First differences</h2>{firsts}
<h2>What was compared</h2>{compared}
{repeat}{origin}
<script type="application/json" id="audit">{json}</script>
</html>
"""
GRID_STYLE = (
    ".grid td,.grid th{padding:.12rem .2rem;text-align:center;border:0}.grid th:first-child{text-align:left}"
    ".grid td i{display:block;width:1.3rem;height:1.3rem;border-radius:3px;background:var(--line)}"
    ".grid i.same{background:var(--good)}.grid i.few{background:var(--u2)}.grid i.many{background:var(--u4)}"
)


def write_server_page(found: ServerAudit) -> str:
    """Return the page of one audit. Its `<script id="audit">` is data: the record as JSON."""
    data = to_json(found)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    command = found.provenance.command if found.provenance else ""
    return PAGE.format(
        title=escape(f"Audit of {found.model}"),
        style=STYLE + GRID_STYLE + FOOTER_STYLE,
        about=escape(
            f"{found.server}; {found.prompts} prompts, {found.tokens} tokens each; every answer against that of the "
            "same prompt alone"
        ),
        tone=("good", "bad", "mute")[found.exit_code],
        conclusion=escape(found.sentence),
        table=write_table(found),
        grid=write_grid(found),
        firsts=write_firsts(found),
        compared="".join(f"<p>{escape(line)}</p>" for line in (found.compared, *found.notes)),
        repeat=f"<h2>Repeat it</h2><pre>{escape(command)}</pre>" if command else "",
        origin=as_footer(found.provenance),
        json=data,
    )


def write_table(found: ServerAudit) -> str:
    """Return the table of variants, with the verdict of each."""
    heads = ("axis", "what was varied", "verdict", "differ", "max |Δ|", "other tokens", "cached")
    rows, axis = [], ""
    for one in found.variants:
        title = "" if one.axis == axis else f"<b>{escape(one.axis)}</b><br>{escape(AXES[one.axis])}"
        axis = one.axis
        figures = (
            f"{one.differ:,} of {one.values:,}",
            f"{one.largest:.3g}",
            f"in {one.changed:,} of {one.requests:,} answers",
            "" if one.cached is None else f"{one.cached:,} tokens",
        )
        cells = "".join(f'<td class="figure">{"" if one.reason else text}' for text in figures)
        chip = f'<span class="chip {tone_of(one.verdict)}">{one.verdict}</span>'
        rows.append(f'<tr><td class="axis-name">{title}<td>{escape(one.name)}<td>{chip}{cells}')
        if one.reason:
            rows.append(f'<tr><td><td colspan="6" class="reason soft">{escape(one.reason)}')
    head = "".join(f"<th>{name}" for name in heads)
    return f'<div class="wide"><table><tr>{head}{"".join(rows)}</table></div>'


def write_grid(found: ServerAudit) -> str:
    """Return a square per variant and prompt: equal, less than half of the log-probabilities differ, or more."""
    judged = [one for one in found.variants if one.by_prompt]
    if not judged:
        return "<p>None was compared.</p>"
    head = "".join(f"<th>{at}" for at in range(len(judged[0].by_prompt)))
    rows = "".join(
        f"<tr><th>{escape(f'{one.axis}, {one.name}')}{''.join(map(write_square, one.by_prompt))}"
        for one in judged
    )
    legend = "Green: equal. Light: some log-probabilities differ. Dark: more than half. Point at a square for counts."
    return f'<div class="wide"><table class="grid"><tr><th>{head}{rows}</table></div><p class="soft">{legend}</p>'


def write_square(counts: tuple[int, int]) -> str:
    """Return one square; its title has the counts."""
    differ, values = counts
    kind = "" if not values else "same" if not differ else "few" if 2 * differ < values else "many"
    return f'<td><i class="{kind}" title="{differ:,} of {values:,}"></i>'


def write_firsts(found: ServerAudit) -> str:
    """Return the first difference of each variant."""
    items = "".join(f"<li>{write_first(one)}" for one in found.variants if one.first)
    return f'<ul class="plain">{items}</ul>' if items else "<p>None.</p>"


def write_first(one: Variant) -> str:
    """Return the first difference of a variant."""
    return f"<b>{escape(one.axis)}</b>, {escape(one.name)}: <code>{escape(one.first)}</code>"
