"""A certificate as plain text for a terminal: the verdict, the classes, where they differ, and static facts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from isobit.certifying.records import (
    FAILED,
    Certified,
    KernelFacts,
    Outcome,
    Parting,
    Step,
    TargetReport,
)
from isobit.certifying.report.drawings import describe_order
from isobit.certifying.report.words import (
    COVERS,
    conclude,
    counted,
    describe_class,
    describe_members,
    join_notes,
    letter,
    listed,
    number_expressions,
)
from isobit.foundation.plain_text import one_line

# What a certificate found broken or could not run: one record per reason, over all targets.


@dataclass
class Failure:
    """One reason, with the targets (and, of some, the configurations) and the places where it was found."""

    verdict: str
    reason: str
    remedy: str
    labels: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """The first place; how many others there are."""
        more = len(self.places) - 1
        others = f" (and {more} more {'place' if more == 1 else 'places'})" if more > 0 else ""
        return f"{self.places[0]}{others}" if self.places else ""


def gather_failures(found: Certified) -> list[Failure]:
    """Return what went wrong by reason, in the sequence in which it was found."""
    failures: dict[tuple[str, str, str], Failure] = {}
    for target in found.targets:
        among = [one.configuration for one in target.outcomes]
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for one in target.outcomes:
            if one.verdict in FAILED:
                groups.setdefault((one.verdict, one.reason, one.remedy), []).append(one)
        for key, outcomes in groups.items():
            failure = failures.setdefault(key, Failure(*key))
            named = describe_members([one.configuration for one in outcomes], among)
            failure.labels.append(
                target.target if named in ("all", "as it is") else f"{target.target} ({named})"
            )
            failure.places += [
                one.where for one in outcomes if one.where and one.where not in failure.places
            ]
    return list(failures.values())


KERNELS, PARTINGS = 12, 2  # compiled kernels and pairs of expressions that are shown
OPTIONS, ORDER = 60, 64  # characters
KNOWN = (0, 1, 2, 4)  # columns of expressions without a known order
FACTS = (
    "kernel",
    "target",
    "registers",
    "spilled",
    "shared",
    "fma",
    "open",
    "ftz",
    "approx.",
    "atomics",
    "options",
)


def describe_certificate(found: Certified, width: int = 100) -> str:
    """Return a certificate as text.

    Args:
        found: a certificate. Control characters in its text are removed.
        width: characters per line of the sentences; tables are as wide as they need to be.

    Returns:
        Lines of text: the verdict, the expressions with their configurations, the first place where two of them
        differ, what could not be run, facts of the compiled kernels, and what the certificate covers.

    Example:
        >>> from isobit.certifying.records import Certified
        >>> print(describe_certificate(Certified("matmul.py:matmul", ())).splitlines()[2])
        Nothing was compiled, so nothing follows.
    """
    parts = [
        one_line(f"Certificate of {found.function}"),
        textwrap.fill(one_line(conclude(found)), width),
    ]
    numbers = number_expressions(found)
    for targets in alike(found):
        if len(targets[0].classes) > 1:
            parts.append(_classes(targets, numbers))
            shown = targets[0].partings[:PARTINGS]
            parts += [_parting(targets[0], one, width, numbers) for one in shown]
            more = len(targets[0].partings) - len(shown)
            parts += [f"and {counted(more, 'more pair')}: --html shows them"] if more else []
    parts += _failures(found, width)
    if any(target.kernels for target in found.targets):
        parts.append(_facts(found))
    if len(left := (*found.unsettled, *found.unjudged)) > 1:
        parts.append("\n".join(["Not judged:", *(f"  {one_line(text)}" for text in left)]))
    parts += [textwrap.fill(one_line(f"Note: {note}"), width) for note in join_notes(found)]
    return "\n\n".join([*parts, f"What this covers, and what it does not: {COVERS}"]) + "\n"


def alike(found: Certified, exactly: bool = False) -> list[list[TargetReport]]:
    """Return targets in groups that divide their configurations in the same way; exactly: by equal expressions."""
    groups: dict[tuple[object, ...], list[TargetReport]] = {}
    for target in found.targets:
        key = tuple(
            (one.digest if exactly else "", *((c.label, rows, of) for c, rows, of in one.members))
            for one in target.classes
        )
        groups.setdefault(key, []).append(target)
    return list(groups.values())


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a table with two spaces between columns; those in `right` are aligned at their right."""
    lines = [[one_line(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[at]) for row in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at])
            for at, cell in enumerate(row)
        ).rstrip()
        for row in lines
    )


def cut(text: str, room: int) -> str:
    """Keep the start of a text."""
    text = one_line(text)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _classes(targets: Sequence[TargetReport], numbers: dict[str, int]) -> str:
    first = targets[0]
    rows = []
    for at, one in enumerate(first.classes):
        digests = list(dict.fromkeys(target.classes[at].digest for target in targets))
        order = one.formula if one.tree is None else describe_order(one.tree)
        letters = ", ".join(letter(numbers[digest]) for digest in digests)
        cells = (letters, describe_class(one, first), f"{len(one.members)}", cut(order, ORDER))
        rows.append([*cells, " ".join(digest[:8] for digest in digests)])
    where = one_line(f"On {listed([target.target for target in targets])}")
    heads = ["expression", "configurations", "count", "order of the first element", "digest"]
    if not any(row[3] for row in rows):
        heads, rows = [heads[at] for at in KNOWN], [[row[at] for at in KNOWN] for row in rows]
    return f"{where}: {counted(len(rows), 'expression')}\n{aligned(heads, rows, (2,))}"


def _parting(target: TargetReport, one: Parting, width: int, numbers: dict[str, int]) -> str:
    left, right = (letter(numbers[target.classes[at].digest]) for at in (one.left, one.right))
    pair = f"Expressions {left} and {right} on {target.target}"
    where = f" in {one.output}" if one.output else ""
    if one.left_step is None and one.right_step is None:
        return one_line(f"{pair} differ{where}. {one.detail}")
    lines = [one_line(f"{pair} first differ here{where}:")]
    sides = (
        (left, one.left_configuration.label, one.left_row, one.left_step),
        (right, one.right_configuration.label, one.right_row, one.right_step),
    )
    for name, label, row, step in sides:
        said = step.text if step else "no operation here"
        lines.append(f"  {name}  " + one_line(f"{label}, row {row}: {said}"))
        lines += [f"     {line}" for line in _places(step)]
    if one.detail:
        lines.append(
            textwrap.fill(one_line(one.detail), width, initial_indent="  ", subsequent_indent="  ")
        )
    if one.equal_below:
        same = counted(one.equal_below, "operation")
        lines.append(f"  The operations before this place are the same: {same}.")
    return "\n".join(lines)


def _places(step: Step | None) -> list[str]:
    """Return the Python line and the PTX line of an operation."""
    if step is None:
        return []
    file, line = step.source
    found = [f"{file.rpartition('/')[2]}:{line}  {step.python.strip()}"] if line else []
    if step.ptx_line:
        found.append(f"PTX line {step.ptx_line}  {cut(step.ptx.strip(), 80)}")
    return [one_line(text) for text in found]


def _failures(found: Certified, width: int) -> list[str]:
    """Return what was found broken or could not be run, by reason."""
    shown = []
    for one in gather_failures(found):
        lines = [f"{one.verdict}: {', '.join(one.labels)}", one.reason]
        lines += [f"at {one.where}"] if one.where else []
        lines += [f"remedy: {one.remedy}"] if one.remedy else []
        shown.append(
            "\n".join(
                textwrap.fill(
                    one_line(line),
                    width,
                    initial_indent="  " if at else "",
                    subsequent_indent="    ",
                )
                for at, line in enumerate(lines)
            )
        )
    return shown


def _facts(found: Certified) -> str:
    kernels = [one for target in found.targets for one in target.kernels]
    rows = [_fact(one) for one in kernels[:KERNELS]]
    text = f"Compiled with Triton {found.triton}\n" if found.triton else ""
    text += aligned(FACTS, rows, (2, 3, 4, 5, 6, 7, 8, 9))
    more = len(kernels) - len(rows)
    return f"{text}\nand {more:,} more kernels: --html or --json lists them all" if more else text


def _fact(one: KernelFacts) -> tuple[str, ...]:
    return (
        cut(one.kernel, 32),
        one.target,
        "–" if one.registers is None else f"{one.registers}",
        "–" if one.spill_bytes is None else f"{one.spill_bytes:,} B",
        f"{one.shared_bytes:,} B",
        f"{one.fused:,}",
        f"{one.open_products:,}",
        f"{sum(one.flushes.values()):,}",
        f"{sum(one.approximate.values()):,}",
        f"{sum(one.atomics.values()):,}",
        cut(one.options, OPTIONS),
    )
