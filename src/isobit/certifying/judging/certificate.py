"""From judged configurations to the report of a target: classes of expressions and where they differ."""

from __future__ import annotations

from dataclasses import replace

from blake3 import blake3

from isobit.certifying.judging.configurations import Surveyed
from isobit.certifying.judging.every_row_count import follow_rows
from isobit.certifying.judging.judging import Expression, Judge
from isobit.certifying.judging.partings import draw_class, find_parting
from isobit.certifying.records import (
    EXECUTED,
    Configuration,
    ExpressionClass,
    Outcome,
    TargetReport,
)
from isobit.certifying.running.compile import Compiler
from isobit.certifying.running.steps import Steps
from isobit.order.engines import ENGINE_OF_TARGET

# Classes after the first whose difference is looked for: each takes two more executions.
LOOKED_AT = 4


def judge_target(
    surveyed: Surveyed, compiler: Compiler, steps: Steps, notes: list[str], unjudged: list[str]
) -> TargetReport:
    """Execute all configurations on one target and compare them; add to what a reader should know."""
    judge, tell = Judge(surveyed, compiler), steps.tell
    for one in surveyed.expanded:
        tell(str(judge.configuration(one)))
        judge.judge(one)
        steps.finish()
    notes += [f"the autotuner would leave out {text}" for text in judge.skipped]
    notes += [text for text in judge.remarks if text not in notes]
    if judge.approximate:
        notes.append(
            f"on {compiler.target}, {', '.join(sorted(judge.approximate))} gives the GPU's own approximation: "
            "expressions are compared as ever, but bits printed here are not the GPU's"
        )
    unjudged += [text for text in judge.thresholds() if text not in unjudged]
    digests = class_digests(judge)
    outcomes = tuple(
        replace(
            outcome,
            expressions=judge.shares(number, digests),
            names=judge.compared(number),
            rows_compared=judge.compared_rows(number),
        )
        for number, outcome in enumerate(judge.outcomes)
    )
    drawn, partings = {}, []
    numbers = list(digests)
    if len(numbers) > 1:
        for place, number in enumerate(numbers[1 : LOOKED_AT + 1], 1):
            tell(f"{compiler.target}: where expressions 1 and {place + 1} differ")
            if (pair := comparable(judge, numbers[0], number)) is not None:
                parting, trees = find_parting(judge, place, *pair)
                partings.append(parting)
                drawn[numbers[0]], drawn[number] = trees
    elif numbers:
        first = next(f[numbers[0]] for f in judge.groups.values() if numbers[0] < len(f))
        tell(f"{compiler.target}: the order of its sums")
        drawn[0] = draw_class(judge, first)
    classes = tuple(
        ExpressionClass(digest, members(outcomes, digest), *drawn.get(number, (None, "")))
        for number, digest in digests.items()
    )
    report = TargetReport(
        compiler.target,
        ENGINE_OF_TARGET[compiler.target],
        outcomes,
        classes,
        tuple(partings),
        tuple(judge.kernels),
    )
    if not report.kept or surveyed.plans[0].rows is None:
        return report
    tell(f"{compiler.target}: what depends on the number of rows")
    shown = follow_rows(surveyed, compiler)
    return replace(report, most_rows=shown.most, rows_reason=shown.why)


def class_digests(judge: Judge) -> dict[int, str]:
    """Return the digest of every expression that a judged row has; of rows with other integers, all count.

    A configuration that turned out to be broken may have added expressions that no other row has.
    """
    digests = {}
    for number in sorted({expression for rows in judge.found for _, expression in rows}):
        each = [found[number].digest for found in judge.groups.values() if number < len(found)]
        joined = blake3("\n".join(sorted(each)).encode()).hexdigest()[:32]
        digests[number] = each[0] if len(judge.groups) == 1 else joined
    return digests


def members(
    outcomes: tuple[Outcome, ...], digest: str
) -> tuple[tuple[Configuration, int, int], ...]:
    """Return the configurations that have an expression, with their rows that have it and all their rows."""
    return tuple(
        (outcome.configuration, share.rows, sum(each.rows for each in outcome.expressions))
        for outcome in outcomes
        for share in outcome.expressions
        if share.digest == digest
    )


def comparable(judge: Judge, first: int, other: int) -> tuple[Expression, Expression] | None:
    """Return two expressions of rows with the same integers."""
    for found in judge.groups.values():
        if max(first, other) < len(found):
            return found[first], found[other]
    return None


def shared_targets(targets: tuple[TargetReport, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the targets that have one expression each, grouped by that expression."""
    groups: dict[str, list[str]] = {}
    for target in targets:
        if target.digest is not None:
            groups.setdefault(target.digest, []).append(target.target)
    return tuple(tuple(group) for group in groups.values())


def cautions(targets: tuple[TargetReport, ...]) -> list[str]:
    """Return notes that follow from the facts of the compiled kernels."""
    notes = []
    kernels = [kernel for target in targets for kernel in target.kernels]
    if opened := [kernel for kernel in kernels if kernel.open_products and not kernel.may_fuse]:
        names = ", ".join(dict.fromkeys(kernel.kernel for kernel in opened))
        notes.append(
            f"in {names} the PTX leaves products and sums unfused that ptxas may fuse; Triton's ptxas does not: its "
            "machine code has no more fused multiply-adds. Another ptxas may: enable_fp_fusion=False forbids it"
        )
    outcomes = [outcome for target in targets for outcome in target.outcomes]
    if outcomes and all(one.verdict == EXECUTED and not one.names for one in outcomes):
        notes.append("nothing was compared: give at least two row counts, or settings that vary")
    return notes
