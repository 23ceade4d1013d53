"""Count positions of rows again, where rows were cut: arguments of a replay that are indices or ends of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import Marks, Rows, select

Known = dict[int, Marks]  # the marks of arguments, by position


def renumber_index(known: Known, rows: Rows, flat: list[Any], made: list[Any]) -> None:
    """Count positions along a dimension again: of index_add, index_copy, scatter and scatter_add."""
    dim, index = flat[1], made[2]
    marks = known.get(0, {})
    dim = dim % flat[0].dim() if isinstance(dim, int) else None
    if dim is None or dim not in marks or not isinstance(index, Tensor):
        return
    made[2] = positions(rows, marks, dim, index)


def renumber_index_put(known: Known, rows: Rows, flat: list[Any], made: list[Any]) -> None:
    """Count positions again in the indices of index_put."""
    for dim, labels in known.get(0, {}).items():
        index = made[1 + dim] if 1 + dim < len(made) - 1 else None
        if isinstance(index, Tensor) and index.dtype != torch.bool:
            made[1 + dim] = positions(rows, {dim: labels}, dim, index)


def renumber_ends(known: Known, rows: Rows, flat: list[Any], made: list[Any]) -> None:
    """Count the ends of groups of rows again: of _grouped_mm."""
    marks = known.get(0, {})
    at = next((i for i, v in enumerate(flat) if i > 1 and isinstance(v, Tensor)), None)
    # A gradient of weights adds over each group's rows.
    dim = 1 if flat[0].dim() == flat[1].dim() == 2 else 0
    if at is None or flat[at].dtype not in (torch.int32, torch.int64) or dim not in marks:
        return
    kept = select(marks[dim], rows, None).to(flat[at].device)
    made[at] = torch.searchsorted(kept, flat[at].to(torch.int64)).to(flat[at].dtype)


def positions(rows: Rows, marks: Marks, dim: int, index: Tensor) -> Tensor:
    """Return the positions of rows among those that are kept."""
    kept = select(marks[dim], rows, None).to(index.device)
    return torch.searchsorted(kept, index.to(torch.int64)).to(index.dtype)


RENUMBERED: dict[str, Callable[[Known, Rows, list[Any], list[Any]], None]] = {
    "aten::index_add": renumber_index,
    "aten::index_copy": renumber_index,
    "aten::scatter_add": renumber_index,
    "aten::scatter": renumber_index,
    "aten::scatter_reduce": renumber_index,
    "aten::index_put": renumber_index_put,
    "aten::_index_put_impl": renumber_index_put,
    "aten::_grouped_mm": renumber_ends,
}
