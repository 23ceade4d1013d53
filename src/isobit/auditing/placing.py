"""Labels of tensors that are made from sizes and filled by index: gradients of `x[index]`, sums of experts' tokens.

Such a tensor is zeros at first, and several labels may fit its size. Which of them is right shows when rows are written
to it by index: a position has the label of the row that is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.call import operator_name
from isobit.auditing.labels import EVERY, LOST, Known, Labels, Ledger, Marks, Rows

# Operators that make a tensor from sizes, whatever tensors they are given.
MAKES = {f"aten::new_{name}" for name in ("zeros", "ones", "empty", "full", "empty_strided")}
BY_LIST = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
BY_DIM = {
    f"aten::{name}{end}" for name in ("index_add", "index_copy", "scatter_add") for end in ("", "_")
}
WRITES_ROWS = BY_LIST | BY_DIM


def written_rows(func: Any, flat: list[Any]) -> list[tuple[int, Tensor, int]]:
    """Return along which dimensions an operator writes rows by index: (dimension, positions, argument written)."""
    name = operator_name(func)
    if name in BY_LIST:
        end = next(
            at for at, v in enumerate(flat) if isinstance(v, bool)
        )  # accumulate, after the values
        found = [
            (dim, v, end - 1) for dim, v in enumerate(flat[1 : end - 1]) if isinstance(v, Tensor)
        ]
    elif name in BY_DIM and isinstance(flat[1], int):
        found = [(flat[1] % flat[0].dim(), flat[2], 3)]
    else:
        return []
    plain = [(dim, as_positions(v), at) for dim, v, at in found]
    return [(dim, v, at) for dim, v, at in plain if v is not None]


def as_positions(index: Tensor) -> Tensor | None:
    """Return positions as a vector; None if an index is no vector."""
    if index.dim() != 1:
        return None
    return (index.nonzero().flatten() if index.dtype == torch.bool else index).cpu()


def place_rows(
    ledger: Ledger, func: Any, flat: list[Any], given: dict[int, Known], variants: Sequence[Rows]
) -> Known | None:
    """Return the marks of a fresh tensor that rows are written to; None if it is not such a call.

    Args:
        ledger: Where the labels that fit a fresh tensor are kept.
        func: The operator.
        flat: Its arguments, the fresh tensor first.
        given: The marks of the arguments.
        variants: The rows of every call of the variant.
    """
    options = ledger.options(flat[0]) if isinstance(flat[0], Tensor) else None
    if not options:
        return None
    rows = written_rows(func, flat)
    found: Marks = {}
    for dim, fitting in options.items():
        labels: Labels | None = None
        for where, positions, at in rows:
            marks = given.get(at, {})
            source = 0 if len(rows) > 1 else dim - flat[0].dim() + flat[at].dim()
            if where == dim and not isinstance(marks, str) and source in marks:
                labels = choose(ledger, fitting, positions, marks[source], variants)
        if labels is None:
            return LOST if rows else None
        found[dim] = labels
    return found


def with_written_rows(
    ledger: Ledger, func: Any, flat: list[Any], given: dict[int, Known], variants: Sequence[Rows]
) -> dict[int, Known]:
    """Return the marks of arguments where rows are written by index: those of a fresh tensor, and of lost indices."""
    if operator_name(func) not in WRITES_ROWS:
        return given
    rows = written_rows(func, flat)
    if not rows or not any(isinstance(marks, str) for marks in given.values()):
        return given
    found = dict(given)
    base = place_rows(ledger, func, flat, given, variants)
    if base is not None:
        found[0] = base
    for dim, _, at in rows:
        marks = given.get(at, {})
        index = 1 + dim if operator_name(func) in BY_LIST else 2
        source = 0 if len(rows) > 1 else dim - flat[0].dim() + flat[at].dim()
        if isinstance(given.get(index), str) and not isinstance(marks, str) and source in marks:
            found[index] = {0: marks[source]}  # an index has one entry for each row that is written
    return found


def choose(
    ledger: Ledger,
    fitting: Sequence[Labels],
    positions: Tensor,
    written: Labels,
    variants: Sequence[Rows],
) -> Labels | None:
    """Return the labels that agree with what is written; None if none do, or several that keep other rows."""
    if len(positions) != len(written):
        return None
    size = len(fitting[0])
    values = torch.full((size,), EVERY)
    values[positions] = written.values
    if not torch.equal(values[positions], written.values):
        return None  # rows of several samples are added at one position
    if not bool((values == EVERY).any()):
        return ledger.vector(values)
    agree = [one for one in fitting if torch.equal(one.values[positions], written.values)]
    same = all(torch.equal(one.kept(r), agree[0].kept(r)) for one in agree for r in variants)
    return agree[0] if agree and same else None
