"""Tables of a certificate's page: expressions, the place where two differ, static facts and configurations."""

from __future__ import annotations

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
from isobit.certifying.report.failures import gather_failures
from isobit.certifying.report.map import key
from isobit.certifying.report.orders import describe_order
from isobit.certifying.report.words import (
    describe_class,
    matrix_instructions,
    number_expressions,
)
from isobit.report.markup import escape, table

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
