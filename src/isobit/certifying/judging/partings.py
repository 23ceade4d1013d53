"""Where two expressions differ: both configurations are executed again, with every operation recorded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from isobit.certifying.judging.judging import Expression, Judge
from isobit.certifying.judging.row_axes import row_shape
from isobit.certifying.names.expressions import Node
from isobit.certifying.names.expressions import first_difference as difference_from_the_result
from isobit.certifying.names.row_names import Rows
from isobit.certifying.names.sum_trees import sum_tree
from isobit.certifying.records import Parting
from isobit.certifying.report.orders import gather_steps
from isobit.certifying.running.recorded_run import RecordedRun
from isobit.order.addition import Branch, find_difference

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
