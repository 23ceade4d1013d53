"""From judged configurations to the report of a target: classes of expressions and where they differ."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from blake3 import blake3

from isobit.certifying.judging.configurations import Surveyed
from isobit.certifying.judging.every_row_count import follow_rows
from isobit.certifying.judging.judging import Expression, Judge
from isobit.certifying.judging.row_axes import row_shape
from isobit.certifying.names.expressions import Node, sum_tree
from isobit.certifying.names.expressions import first_difference as difference_from_the_result
from isobit.certifying.names.row_names import Rows
from isobit.certifying.records import (
    EXECUTED,
    Configuration,
    ExpressionClass,
    Outcome,
    Parting,
    TargetReport,
)
from isobit.certifying.report.drawings import gather_steps
from isobit.certifying.running.compile import Compiler
from isobit.certifying.running.execution import Steps
from isobit.certifying.running.recorded_run import RecordedRun
from isobit.order.addition import Branch, find_difference
from isobit.order.engines import ENGINE_OF_TARGET

# Where two expressions differ: both configurations are executed again, with every operation recorded.

Drawn = tuple[Branch | None, str]
MOST_COUNTED = 30_000


def find_parting(
    judge: Judge, number: int, left: Expression, right: Expression
) -> tuple[Parting, tuple[Drawn, Drawn]]:
    """Return the first place where two expressions differ, and both orders of addition where they are sums."""
    mine, ours = record(judge, left)
    other, theirs = record(judge, right)
    a, b = ours.names[left.row], theirs.names[right.row]
    found = (a != b).nonzero()[0] if a.shape == b.shape else np.zeros(1, dtype=np.int64)
    element = int(found[0]) if len(found) else 0
    x, y = int(a[element]), int(b[element])
    drawn = (draw(mine, x), draw(other, y))
    parting = Parting(
        0,
        number,
        judge.configuration(left.planned),
        judge.configuration(right.planned),
        left.row,
        right.row,
        ours.place(element),
        detail="" if mine.complete and other.complete else "not all operations were recorded",
    )
    pair, equal = first_operations(mine, x, other, y)
    if pair is None:
        return parting, drawn
    parting = replace(parting, left_step=mine.step(pair[0]), right_step=other.step(pair[1]))
    return replace(parting, equal_below=equal, detail=in_terms(drawn) or parting.detail), drawn


def first_operations(
    mine: RecordedRun, x: int, other: RecordedRun, y: int
) -> tuple[tuple[int, int] | None, int]:
    """Return the first operation of each expression that the other does not have, and how many both have.

    Both take the same operand: a value that both compute, or an input. Among several, the one that the kernel executes
    first is returned.
    """
    left, right = operations(mine, x), operations(other, y)
    if left is None or right is None:  # too many: walk from the result
        found = difference_from_the_result(mine, x, other, y)
        return (None if found is None else (found.left.name, found.right.name)), 0
    shared = left.keys() & right.keys()
    own = above(left, x, shared)
    first = [node for node in own.values() if not any(part in own for part in node.parts)]
    theirs: dict[int, Node] = {}
    for node in sorted(above(right, y, shared).values(), key=other.moment):
        for part in node.parts:
            theirs.setdefault(part, node)
    for node in sorted(first, key=mine.moment):
        for part in sorted(node.parts, key=lambda each: each not in shared):
            known = part in shared or mine.element(part) is not None
            if known and part in theirs:
                return (node.name, theirs[part].name), len(shared)
    return (x, y), len(shared)


def above(nodes: dict[int, Node], name: int, shared: Collection[int]) -> dict[int, Node]:
    """Return the operations between a result and what both expressions have.

    What is below a shared operation is left out: a maximum has one name whichever way it was found.
    """
    found, work = dict[int, Node](), [name]
    while work:
        at = work.pop()
        if at in nodes and at not in shared and at not in found:
            found[at] = nodes[at]
            work += nodes[at].parts
    return found


def in_terms(drawn: tuple[Drawn, Drawn]) -> str:
    """Return the first addition of terms that differs, as a sentence; "" if both are not sums that differ."""
    left, right = drawn[0][0], drawn[1][0]
    found = None
    if left is not None and right is not None:
        # The products of a tensor-core step together: a sentence, not a list of them.
        found = find_difference(gather_steps(left), gather_steps(right))
    return (
        "" if found is None else f"By terms of the row, one adds {found[0]}, the other {found[1]}."
    )


def draw_class(judge: Judge, found: Expression) -> Drawn:
    """Return the order of addition of an expression's first element, if it is one sum, and a short text."""
    table, rows = record(judge, found)
    return draw(table, int(rows.names[found.row][0]))


def record(judge: Judge, found: Expression) -> tuple[RecordedRun, Rows]:
    """Execute the configuration where an expression was first seen, and record it."""
    run, rows = judge.execute(found.planned, [0] * (found.planned.rows or 1), record=True)
    return RecordedRun(run), rows


def draw(table: RecordedRun, name: int) -> Drawn:
    """Return the order of addition and the formula of a name."""
    assert table.run.storages is not None
    views = table.run.storages.named_views
    rows = {v.argument: row_shape(v.shape, v.axis) for v in views if v.axis is not None}
    whole = {view.argument: view.shape for view in views}
    return sum_tree(table, name, rows or whole), table.formula(name)


def operations(table: RecordedRun, name: int) -> dict[int, Node] | None:
    """Return every operation of an expression by its name, or None if there are more than `MOST_COUNTED`."""
    seen, found, work = {name}, dict[int, Node](), [name]
    while work:
        node = table.node(work.pop())
        if node is None:
            continue
        found[node.name] = node
        if len(found) > MOST_COUNTED:
            return None
        for each in node.parts:
            if each not in seen:
                seen.add(each)
                work.append(each)
    return found


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
            "machine code has no fused multiply-add of its own. Another ptxas may: enable_fp_fusion=False forbids it"
        )
    outcomes = [outcome for target in targets for outcome in target.outcomes]
    if outcomes and all(one.verdict == EXECUTED and not one.names for one in outcomes):
        notes.append("nothing was compared: give at least two row counts, or settings that vary")
    return notes
