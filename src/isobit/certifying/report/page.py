"""A self-contained HTML page of a certificate: verdict, map of configurations, expressions, and where they differ."""

from __future__ import annotations

import json

from isobit.certifying.records import Certified, TargetReport
from isobit.certifying.report import map as certify_map
from isobit.certifying.report.json import plain_certificate
from isobit.certifying.report.map import draw_map
from isobit.certifying.report.orders import draw_expressions, undrawn
from isobit.certifying.report.tables import (
    show_classes,
    show_failures,
    show_kernels,
    show_parting,
    show_runs,
    show_tensors,
)
from isobit.certifying.report.text import alike
from isobit.certifying.report.words import (
    COVERS,
    conclude,
    count_configurations,
    counted,
    join_notes,
    listed,
    number_expressions,
    tone,
)
from isobit.foundation.plain_text import plain_json
from isobit.report import pages
from isobit.report.markup import FOOTER_STYLE, as_footer, escape
from isobit.report.markup import STYLE as PICTURES

PARTINGS = 5  # pairs of expressions that are shown per target
STYLE = """
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem;margin:.6rem 0}
.card{border:1px solid var(--line);border-left:4px solid var(--tone,var(--line));border-radius:8px;
padding:.5rem .9rem;margin:.6rem 0;min-width:0}.pair .card{border-left-width:1px;margin:0}
.formula{font:14px/1.5 ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
h3 .key{font-weight:650}.lead{max-width:60rem}code.opcode{overflow-wrap:normal}
.orders{display:flex;flex-wrap:wrap;gap:1rem;margin:.6rem 0}.orders .wide{max-width:100%}.orders svg{max-width:none;
display:block}.map-box{max-width:100%;overflow-x:auto}
"""
LEGEND = (
    "Terms run along the horizontal axis; a bar is a chain of neighbours, dots on a line a chain of separate "
    "terms, a junction an addition. Blue: every expression here makes this addition; violet: some others do; "
    "orange: none."
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<h1>{title}</h1><p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>
<h2>Which configurations share an expression</h2>{map}{failures}
{expressions}
<h2>Compiled kernels</h2>{kernels}{notes}
<h2>What was compared</h2>{tensors}{runs}
<h2>What this covers</h2>{covers}
{repeat}{origin}
<script type="application/json" id="certificate">{json}</script>
</html>
"""


def write_certificate_page(found: Certified) -> str:
    """Return a certificate as one HTML file that needs no network.

    Args:
        found: a certificate. Its text is escaped; equal records give equal pages.

    Returns:
        The page. Its `<script id="certificate">` is data: what `certificate_as_json` writes.

    Example:
        >>> from isobit.certifying.records import Certified
        >>> "Nothing was compiled" in write_certificate_page(Certified("matmul.py:matmul", ()))
        True
    """
    groups = [targets for targets in alike(found, exactly=True) if targets[0].classes]
    firsts = [targets[0] for targets in alike(found)]
    numbers = number_expressions(found)
    expressions = "".join(_expressions(each, each[0] not in firsts, numbers) for each in groups)
    return PAGE.format(
        title=escape(f"Certificate of {found.function}"),
        style=PICTURES + pages.AUDIT_STYLE + certify_map.STYLE + STYLE + FOOTER_STYLE,
        about=_about(found),
        tone=tone(found),
        conclusion=escape(conclude(found)),
        map=draw_map(found),
        failures=show_failures(found),
        expressions=f"<h2>Expressions</h2>{expressions}" if expressions else "",
        kernels=show_kernels(found),
        notes=_list(join_notes(found)),
        tensors=show_tensors(found),
        runs=show_runs(found),
        covers=_covers(found),
        repeat=_repeat(found),
        origin=as_footer(found.provenance),
        json=_data(found),
    )


def _data(found: Certified) -> str:
    """Return the certificate as JSON for a script element, which no text in it can end."""
    text = plain_json(
        json.dumps(plain_certificate(found), ensure_ascii=False, separators=(",", ":"))
    )
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _about(found: Certified) -> str:
    if not found.targets:
        return "no target"
    parts = [count_configurations(found), listed([one.target for one in found.targets])]
    parts += [f"Triton {found.triton}"] if found.triton else []
    parts += [f"{found.seconds:.1f} s"] if found.seconds else []
    return escape("; ".join(parts))


def _list(notes: list[str]) -> str:
    items = "".join(f"<li>{escape(note)}" for note in notes)
    return f'<ul class="conclusions">{items}</ul>' if items else ""


def _expressions(targets: list[TargetReport], repeated: bool, numbers: dict[str, int]) -> str:
    """Return the expressions that targets share; repeated: others have divided their configurations alike."""
    first = targets[0]
    picture = draw_expressions(first, numbers)
    drawn = f'<div class="orders">{picture}</div>' if picture else ""
    without = ""
    if picture and undrawn(first):
        without = (
            f'<p class="soft">{counted(len(undrawn(first)), "more expression")} not drawn.</p>'
        )
    elif not picture:
        without = '<p class="soft">There is no picture: an element of the output is more than one sum.</p>'
    parts = "".join(show_parting(one, first, numbers) for one in first.partings[:PARTINGS])
    more = len(first.partings) - PARTINGS
    rest = f'<p class="soft">{counted(more, "more pair")} differ.</p>' if more > 0 else ""
    if parts and len(targets) > 1:
        rest += f'<p class="soft">Lines of PTX are those of {escape(first.target)}.</p>'
    if parts and repeated:
        parts = f"<details><summary>Where they first differ</summary>{parts}{rest}</details>"
        rest = ""
    names = listed([escape(one.target) for one in targets])
    legend = f'<p class="soft">{LEGEND}</p>' if picture and not repeated else ""
    return f"<h3>On {names}</h3>{show_classes(first, numbers)}{drawn}{legend}{without}{parts}{rest}"


def _covers(found: Certified) -> str:
    return (
        '<p class="lead">The PTX that Triton made for these targets and options, run for these sizes on a CPU; '
        "integers have the values that were passed, floats stand for all values. Equal expressions have equal bits "
        "for all float inputs on one target; on two targets, unless an instruction is an approximation of the GPU. "
        "Trusted: ptxas, and that names of 62 bits do not collide. Nothing was run on a GPU. "
        f"All of it: {COVERS}.</p>"
    )


def _repeat(found: Certified) -> str:
    if found.provenance is None or not found.provenance.command:
        return '<h2>Repeat it</h2><p class="soft">The command was not recorded.</p>'
    return f"<h2>Repeat it</h2><pre>{escape(found.provenance.command)}</pre>"
