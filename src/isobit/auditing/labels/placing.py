"""Labels of tensors that are made from sizes and filled by index: gradients of `x[index]`, sums of experts' tokens.

Such a tensor is zeros or empty at first, and several labels may fit its size. Which of them is right shows when rows
are written to it by index: a position has the label of the row that is written there. That holds also for a tensor that
was made like one with rows (`zeros_like(y)` before `z[order] = y`): it has their number, not their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import EVERY, LOST, Known, Labels, Ledger, Marks, Rows
from isobit.auditing.replay.call import operator_name

# Operators that make a tensor from sizes, whatever tensors they are given.
MAKES = {f"aten::new_{name}" for name in ("zeros", "ones", "empty", "full", "empty_strided")}
BY_LIST = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
BY_DIM = {
    f"aten::{name}{end}"
    for name in ("index_add", "index_copy", "scatter_add", "scatter", "scatter_reduce")
    for end in ("", "_")
}
WRITES_ROWS = BY_LIST | BY_DIM
# Operators that make a tensor of another one's sizes, and those that fill it with one number.
LIKES = {f"aten::{name}_like" for name in ("zeros", "ones", "empty", "full")}
FILLS = {"aten::zero_", "aten::fill_"}


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
    elif name in BY_DIM and isinstance(flat[1], int) and isinstance(flat[3], Tensor):
        dim = flat[1] % max(flat[0].dim(), 1)
        return [(dim, v, 3) for v in [as_positions(along(flat[2], dim))] if v is not None]
    else:
        return []
    plain = [(dim, as_positions(v), at) for dim, v, at in found]
    return [(dim, v, at) for dim, v, at in plain if v is not None]


def along(index: Tensor, dim: int) -> Tensor:
    """Return an index that is the same for all elements of a row, as scatter takes it, as a vector of its rows."""
    if index.dim() < 2 or not index.numel():
        return index
    lines = index.movedim(dim, 0).flatten(1)
    return lines[:, 0] if bool((lines == lines[:, :1]).all()) else index


def as_positions(index: Tensor) -> Tensor | None:
    """Return positions as a vector; None if an index is no vector."""
    if index.dim() != 1:
        return None
    return (index.nonzero().flatten() if index.dtype == torch.bool else index).cpu()


def place_rows(
    ledger: Ledger, func: Any, flat: list[Any], given: dict[int, Known], variants: Sequence[Rows]
) -> Known | None:
    """Return the marks of a fresh or overwritten tensor that rows are written to; None if it is not such a call.

    Args:
        ledger: Where the labels that fit a fresh tensor are kept.
        func: The operator.
        flat: Its arguments, the fresh tensor first.
        given: The marks of the arguments.
        variants: The rows of every call of the variant.
    """
    options = ledger.options(flat[0]) if isinstance(flat[0], Tensor) else None
    if not options:
        return overwritten_rows(ledger, func, flat, given)
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


def overwritten_rows(
    ledger: Ledger, func: Any, flat: list[Any], given: dict[int, Known]
) -> Known | None:
    """Return the marks of a tensor with rows of which some are replaced by those of other samples."""
    rows = written_rows(func, flat)
    before = given.get(0, {})
    if len(rows) != 1 or not replaces(func, flat) or isinstance(before, str):
        return None
    ((dim, positions, at),) = rows
    marks = given.get(at, {})
    source = dim - flat[0].dim() + flat[at].dim()
    if dim not in before or isinstance(marks, str) or source not in marks:
        return None
    written = marks[source].values
    if len(written) != len(positions):
        return None
    values = before[dim].values.clone()
    values[positions] = written
    if not torch.equal(values[positions], written):
        return LOST  # rows of several samples are written to one position
    return {**before, dim: ledger.vector(values)}


def replaces(func: Any, flat: list[Any]) -> bool:
    """Return whether rows that an operator writes replace those that were there, and are not added to them."""
    name = operator_name(func)
    if name in BY_LIST:
        return not next(v for v in flat if isinstance(v, bool))
    plain = name.rstrip("_") in ("aten::index_copy", "aten::scatter")
    return plain and "reduce" not in func._schema.overload_name


def with_written_rows(
    ledger: Ledger, func: Any, flat: list[Any], given: dict[int, Known], variants: Sequence[Rows]
) -> dict[int, Known]:
    """Return the marks of arguments where rows are written by index: those of a fresh tensor, and of lost indices."""
    if operator_name(func) not in WRITES_ROWS:
        return given
    rows = written_rows(func, flat)
    if not rows:
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
