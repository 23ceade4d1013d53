"""A self-contained HTML page of a certificate: verdict, map of configurations, expressions, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Sequence

from isobit.certifying.records import (
    BROKEN,
    FAILED,
    Certified,
    KernelFacts,
    Outcome,
    Parting,
    Step,
    TargetReport,
)
from isobit.certifying.report import drawings as certify_map
from isobit.certifying.report.drawings import (
    describe_order,
    draw_expressions,
    draw_map,
    key,
    undrawn,
)
from isobit.certifying.report.json import plain_certificate
from isobit.certifying.report.text import alike, gather_failures
from isobit.certifying.report.words import (
    COVERS,
    conclude,
    count_configurations,
    counted,
    describe_class,
    join_notes,
    listed,
    matrix_instructions,
    number_expressions,
    tone,
)
from isobit.foundation.plain_text import plain_json
from isobit.report.markup import STYLE as PICTURES
from isobit.report.markup import escape, table
from isobit.report.pages import AUDIT_STYLE, write_data, write_document

# Tables of a certificate's page: expressions, the place where two differ, static facts and configurations.

MISSING = "–"
FACTS = (
    "kernel",
    "target",
    "registers",
    "spilled",
    "shared memory",
    "tensor core",
    "fma",
    "flush to zero",
    "approximate",
    "atomics",
    "PTX",
)
RUNS = (
    "configuration",
    "expression",
    "names",
    "rows with equal bits",
    "matrix instruction",
    "instructions",
    "seconds",
)


def show_classes(target: TargetReport, numbers: dict[str, int]) -> str:
    """Return the expressions of a target with their configurations."""
    rows, total = [], len(target.outcomes)
    for one in target.classes:
        order = describe_order(one.tree) if one.tree is not None else one.formula
        rows.append(
            f"<tr><td>{key(numbers[one.digest])}<td>{escape(describe_class(one, target))}"
            f'<td class="figure">{len(one.members):,} of {total:,}'
            f'<td class="name">{escape(order) or MISSING}'
            f'<td class="nowrap"><code>{escape(one.digest[:16])}</code>'
        )
    heads = ("", "configurations", "how many", "order of the first element", "digest")
    return table(heads, rows)


def show_parting(one: Parting, target: TargetReport, numbers: dict[str, int]) -> str:
    """Return the first place where two expressions of a target differ, as two cards side by side."""
    left, right = (numbers[target.classes[at].digest] for at in (one.left, one.right))
    sides = (
        (left, one.left_configuration.label, one.left_row, one.left_step),
        (right, one.right_configuration.label, one.right_row, one.right_step),
    )
    cards = "".join(
        f'<div class="card"><p>{key(at)} <b>{escape(label)}</b> '
        f'<span class="soft nowrap">row {row:,}</span></p>{_step(step)}</div>'
        for at, label, row, step in sides
    )
    where = f" in {escape(one.output)}" if one.output else ""
    below = ""
    if one.equal_below:
        below = f" The {one.equal_below:,} operations before it are the same."
    return (
        f"<h3>{key(left)} and {key(right)} first differ here{where}</h3>"
        f'<p>{escape(one.detail)}{below}</p><div class="pair">{cards}</div>'
    )


def _step(step: Step | None) -> str:
    if step is None:
        return '<p class="soft">There is no operation at this place.</p>'
    shown = f'<p class="formula">{escape(step.text)}</p>'
    file, line = step.source
    if line:
        name = file.rpartition("/")[2]
        shown += (
            f'<p class="soft">{escape(name)}, line {line:,}</p>'
            f"<pre>{escape(step.python.strip()) or MISSING}</pre>"
        )
    if step.ptx_line:
        shown += (
            f'<p class="soft">PTX, line {step.ptx_line:,}</p><pre>{escape(step.ptx.strip())}</pre>'
        )
    return shown


def show_failures(found: Certified) -> str:
    """Return what is broken or could not be run: the reason, the place and the remedy."""
    shown = []
    for one in gather_failures(found):
        tone = "bad" if one.verdict == BROKEN else "mute"
        facts = [("what", one.reason), ("where", one.where), ("remedy", one.remedy)]
        rows = "".join(f"<dt>{name}<dd>{escape(text)}" for name, text in facts if text)
        shown.append(
            f'<div class="card {tone}"><p><span class="chip {tone}">{escape(one.verdict)}</span> '
            f'<b>{escape(", ".join(one.labels))}</b></p><dl class="facts">{rows}</dl></div>'
        )
    return "".join(shown)


def _instruction(name: str) -> str:
    """Return the name of an instruction, which may be broken after its dots only."""
    return f'<code class="opcode">{escape(name).replace(".", ".<wbr>")}</code>'


def _counts(found: dict[str, int]) -> str:
    """Return instructions with how often each is in the text."""
    if not found:
        return "0"
    return "<br>".join(f"{count:,} × {_instruction(name)}" for name, count in found.items())


def _bytes(number: int | None) -> str:
    return MISSING if number is None else f"{number:,} B"


def show_kernels(found: Certified) -> str:
    """Return what can be read from the text of each compiled kernel."""
    rows = [_kernel(one) for target in found.targets for one in target.kernels]
    return table(FACTS, rows, 12) if rows else '<p class="soft">No kernel was compiled.</p>'


def _kernel(one: KernelFacts) -> str:
    fused = f"{one.fused:,}"
    if one.open_products:
        fused += f'<br><span class="soft nowrap">{one.open_products:,} open</span>'
    spilled = _bytes(one.spill_bytes)
    if one.spill_bytes:
        spilled = f'<span class="chip warn">{spilled}</span>'
    atomics = _counts(one.atomics)
    if one.float_atomics:
        atomics += f'<br><span class="chip bad">{one.float_atomics:,} on floats</span>'
    cells = (
        f'<b>{escape(one.kernel)}</b><br><span class="soft">{escape(one.options)}</span>',
        escape(one.target),
        MISSING if one.registers is None else f"{one.registers:,}",
        spilled,
        _bytes(one.shared_bytes),
        _counts(one.tensor_core),
        fused,
        _counts(one.flushes),
        _counts(one.approximate),
        atomics,
        f'<span class="nowrap">{one.lines:,} lines<br><code>{escape(one.digest[:12])}</code></span>',
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


def show_tensors(found: Certified) -> str:
    """Return how inputs and outputs were read: what a row of each is."""
    rows = [
        f"<tr><td>{escape(one.name)}<td>{escape(one.role)}<td>{escape(one.shape)}"
        f"<td>{escape(one.dtype)}<td>{_rows(one.row_axis, one.per_row)}"
        for one in found.tensors
    ]
    return table(("tensor", "is", "shape", "dtype", "a row is"), rows) if rows else ""


def _rows(axis: int | None, per_row: int) -> str:
    if axis is None:
        return "the whole tensor, the same for all rows"
    return f"{per_row} along axis {axis}" if per_row > 1 else f"one index of axis {axis}"


def show_runs(found: Certified) -> str:
    """Return every configuration with what was counted, folded away."""
    rows, numbers = [], number_expressions(found)
    for target in found.targets:
        kinds = {
            configuration: kind
            for kind, members in matrix_instructions(target).items()
            for configuration in members
        }
        rows += [_run(one, numbers, kinds.get(one.configuration, "")) for one in target.outcomes]
    if not rows:
        return ""
    inner = table(RUNS, rows, len(rows))
    return f"<details><summary>All {len(rows):,} configurations</summary>{inner}</details>"


def _run(one: Outcome, places: dict[str, int], matrix: str) -> str:
    letters = _letters(one, places)
    bits = f"{one.bits_equal:,} of {one.bits_rows:,}" if one.bits_rows else MISSING
    cells: Sequence[str] = (
        escape(str(one.configuration)),
        letters,
        f"{one.names:,}",
        bits,
        _instruction(matrix) if matrix else MISSING,
        f"{one.executed:,}",
        f"{one.seconds:.1f}",
    )
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


def _letters(one: Outcome, places: dict[str, int]) -> str:
    if one.verdict in FAILED:
        return f'<span class="chip {"bad" if one.verdict == BROKEN else "mute"}">{escape(one.verdict)}</span>'
    found = [share for share in one.expressions if share.digest in places]
    some = len(found) > 1
    return ", ".join(
        key(places[share.digest]) + (f" {share.rows:,} rows" if some else "") for share in found
    )


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
BODY = """<p class="soft">{about}</p>
<p class="conclusion {tone}">{conclusion}</p>
<h2>Which configurations share an expression</h2>{map}{failures}
{expressions}
<h2>Compiled kernels</h2>{kernels}{notes}
<h2>What was compared</h2>{tensors}{runs}
<h2>What this covers</h2>{covers}
{repeat}"""


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
    record = plain_json(
        json.dumps(plain_certificate(found), ensure_ascii=False, separators=(",", ":"))
    )
    body = BODY.format(
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
    )
    return write_document(
        f"Certificate of {found.function}",
        PICTURES + AUDIT_STYLE + certify_map.MAP_STYLE + STYLE,
        body,
        found.provenance,
        write_data("certificate", record),
    )


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
