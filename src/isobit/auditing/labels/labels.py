"""[Note: labels] Which index of which dimension belongs to which sample, for every tensor of a run.

A *label* is a whole number: the sample of a row on the batch axis, the position of a token on the padding axis. Labels
are a vector over one dimension of a tensor. Inputs are labelled by the audit; labels then follow the tensors:

- a view is applied to the labels themselves (`views.py`), so [B, T, H] → [B·T, H] or a transpose keeps them right;
- an operator that moves rows by an index (`index`, `gather`, `sort`) moves the labels by the same index;
- for any other operator, the labelled dimensions get another size on the meta device, and the dimensions of the result
  that change with them have their labels;
- a tensor that is made from sizes alone (`arange`, `zeros`, `expand`) has labels where its size differs from that of
  the same call in the variant.

Where none of these applies the rows are lost, and what is computed from them is not judged, with that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

LOST = "its rows could not be followed to their samples"
EVERY = (
    -1
)  # the label of what belongs to every row, such as a column that is the same for all samples
MIXED = "adds over samples, so that its result is no sample's row"


class Labels:
    """The labels of one dimension. Equal labels are one object, so that they can be compared by identity."""

    of_inputs = False  # whether an input of the run has these

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().to("cpu", torch.int64).contiguous()
        self.key = (len(self.values), hash(tuple(self.values.tolist())))
        self._kept: dict[object, Tensor] = {}
        self._spans: dict[object, tuple[int, int, bool]] = {}
        self._size = len(self.values)

    def __len__(self) -> int:
        return self._size

    def kept(self, rows: Rows) -> Tensor:
        """Return the indices that have one of these labels, in ascending order."""
        if rows not in self._kept:
            kept = torch.isin(self.values, rows.labels) | (self.values == EVERY)
            self._kept[rows] = kept.nonzero().flatten()
        return self._kept[rows]

    def span(self, rows: Rows) -> tuple[int, int, bool]:
        """Return the first of these indices, how many there are, and whether they are next to each other."""
        if rows not in self._spans:
            index = self.kept(rows)
            count = len(index)
            near = count > 0 and int(index[-1] - index[0]) == count - 1
            self._spans[rows] = (int(index[0]) if count else 0, count, near)
        return self._spans[rows]


class Rows:
    """Labels to keep: the rows that one call of the variant computes.

    Attributes:
        labels: these rows.
        context: these and earlier rows that the call reads from a cache, or None.
    """

    def __init__(self, labels: Sequence[int], context: Sequence[int] | None = None) -> None:
        self.labels = torch.tensor(list(labels), dtype=torch.int64)
        self.context = None if context is None else Rows(context)
        self._since: dict[int, Rows] = {}

    def since(self, first: int) -> Rows:
        """Return the rows from a label on, which are those that a cache with a window keeps."""
        if first not in self._since:
            self._since[first] = Rows(self.labels[self.labels >= first].tolist())
        return self._since[first]


Marks = dict[int, Labels]  # by dimension
Known = Marks | str  # a string is the reason why rows are not known


class Ledger:
    """The marks of every tensor of a run, by storage and geometry: aliases and saved tensors are found again."""

    def __init__(self) -> None:
        self._vectors: dict[object, Labels] = {}
        self._by_length: dict[int, list[Labels]] = {}
        self._marks: dict[int, tuple[StorageWeakRef, dict[object, Known]]] = {}
        self._options: dict[int, tuple[StorageWeakRef, object, dict[int, list[Labels]]]] = {}
        self._changed: dict[int, StorageWeakRef] = {}

    def vector(self, values: Tensor) -> Labels:
        """Return the one object of these labels."""
        made = Labels(values)
        known = self._vectors.get(made.key)
        if known is not None:
            return known
        self._vectors[made.key] = made
        self._by_length.setdefault(len(made), []).append(made)
        return made

    def of_length(self, length: int) -> list[Labels]:
        """Return every labels seen with this length."""
        return self._by_length.get(length, [])

    def get(self, tensor: Tensor) -> Known:
        """Return the marks of a tensor: {} if it has no rows of samples, or a reason why they are not known."""
        entry = self._marks.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[0].expired():  # type: ignore[no-untyped-call]
            return {}
        return entry[1].get(geometry(tensor), {})

    def put(self, tensor: Tensor, marks: Known) -> None:
        """Set the marks of a tensor."""
        storage = tensor.untyped_storage()
        entry = self._marks.get(storage._cdata)
        if entry is None or entry[0].expired():  # type: ignore[no-untyped-call]
            if not marks:
                return
            entry = self._marks[storage._cdata] = (StorageWeakRef(storage), {})  # type: ignore[no-untyped-call]
        entry[1][geometry(tensor)] = marks

    def guess(self, tensor: Tensor, options: dict[int, list[Labels]]) -> None:
        """Keep which labels fit the sizes of a tensor that was made from sizes alone."""
        storage = tensor.untyped_storage()
        self._options[storage._cdata] = (StorageWeakRef(storage), geometry(tensor), options)  # type: ignore[no-untyped-call]

    def options(self, tensor: Tensor) -> dict[int, list[Labels]] | None:
        """Return which labels fit the sizes of a tensor, if it was made from sizes alone."""
        found = self._options.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired() or found[1] != geometry(tensor):  # type: ignore[no-untyped-call]
            return None
        return found[2]

    def forget_options(self, tensor: Tensor) -> None:
        """Take a tensor as one with contents from now on."""
        self._options.pop(tensor.untyped_storage()._cdata, None)

    def change(self, tensor: Tensor) -> None:
        """Note that a tensor was changed by a guilty operator before it."""
        storage = tensor.untyped_storage()
        self._changed[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_changed(self, tensor: Tensor) -> bool:
        """Return whether a guilty operator changed this tensor, or one that it was computed from."""
        found = self._changed.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()  # type: ignore[no-untyped-call]


def geometry(tensor: Tensor) -> object:
    """Return what tells views of one storage apart."""
    return (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def select(labels: Labels, rows: Rows, size: int | None) -> Tensor:
    """Return the indices to keep: those of the rows, or of their context where the variant's size says so."""
    return labels.kept(rows_for(labels, rows, size))


def rows_for(labels: Labels, rows: Rows, size: int | None) -> Rows:
    """Return the rows to keep, or their context where the variant's size says so.

    A size between the two is that of the context's last rows: a cache with a sliding window drops those before them.
    """
    if size is None or rows.context is None or labels.span(rows)[1] >= size:
        return rows
    kept = labels.values[labels.kept(rows.context)]
    known = kept[kept != EVERY].sort().values
    missing = len(kept) - size
    if not 0 <= missing < len(known):
        return rows
    some = rows.context.since(int(known[missing])) if missing else rows.context
    return some if labels.span(some)[1] == size else rows


def cut(tensor: Tensor, marks: Marks, rows: Rows, shape: Sequence[int] | None = None) -> Tensor:
    """Return the part of a tensor that has these rows; a view where they are next to each other.

    Args:
        tensor: A tensor of the audited run.
        marks: Its marks.
        rows: The rows to keep.
        shape: The shape of the same tensor in the variant, if known.
    """
    for dim, labels in marks.items():
        size = shape[dim] if shape is not None and len(shape) == tensor.dim() else None
        chosen = rows_for(labels, rows, size)
        first, count, near = labels.span(chosen)
        if count == len(labels):
            continue
        if near:
            tensor = tensor.narrow(dim, first, count)
        else:
            tensor = tensor.index_select(dim, labels.kept(chosen).to(tensor.device))
    return tensor


def write(
    tensor: Tensor, marks: Marks, rows: Rows, values: Tensor, shape: Sequence[int] | None = None
) -> None:
    """Write values into the part of a tensor that `cut` would return."""
    if not marks:
        tensor.copy_(values)
        return
    same = shape is not None and len(shape) == tensor.dim()
    index: list[Tensor | slice] = []
    for dim in range(tensor.dim()):
        kept: Tensor | slice = slice(None)
        if dim in marks:
            size = shape[dim] if same and shape is not None else None
            kept = as_slice(select(marks[dim], rows, size))
        index.append(kept)
    if all(isinstance(one, slice) for one in index):
        tensor[tuple(index)] = values
        return
    whole = [
        (torch.arange(size)[one] if isinstance(one, slice) else one).to(tensor.device)
        for one, size in zip(index, tensor.shape, strict=True)
    ]
    tensor[torch.meshgrid(whole, indexing="ij")] = values


def as_slice(index: Tensor) -> Tensor | slice:
    """Return indices as a slice where they are next to each other."""
    if len(index) and int(index[-1] - index[0]) == len(index) - 1:
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


# Count positions of rows again, where rows were cut: arguments of a replay that are indices or ends of groups.

ArgumentMarks = dict[int, Marks]  # the marks of arguments, by position


def renumber_index(known: ArgumentMarks, rows: Rows, flat: list[Any], made: list[Any]) -> None:
    """Count positions along a dimension again: of index_add, index_copy, scatter and scatter_add."""
    dim, index = flat[1], made[2]
    marks = known.get(0, {})
    dim = dim % flat[0].dim() if isinstance(dim, int) else None
    if dim is None or dim not in marks or not isinstance(index, Tensor):
        return
    made[2] = positions(rows, marks, dim, index)


def renumber_index_put(known: ArgumentMarks, rows: Rows, flat: list[Any], made: list[Any]) -> None:
    """Count positions again in the indices of index_put."""
    for dim, labels in known.get(0, {}).items():
        index = made[1 + dim] if 1 + dim < len(made) - 1 else None
        if isinstance(index, Tensor) and index.dtype != torch.bool:
            made[1 + dim] = positions(rows, {dim: labels}, dim, index)


def renumber_ends(known: ArgumentMarks, rows: Rows, flat: list[Any], made: list[Any]) -> None:
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


RENUMBERED: dict[str, Callable[[ArgumentMarks, Rows, list[Any], list[Any]], None]] = {
    "aten::index_add": renumber_index,
    "aten::index_copy": renumber_index,
    "aten::scatter_add": renumber_index,
    "aten::scatter": renumber_index,
    "aten::scatter_reduce": renumber_index,
    "aten::index_put": renumber_index_put,
    "aten::_index_put_impl": renumber_index_put,
    "aten::_grouped_mm": renumber_ends,
}
