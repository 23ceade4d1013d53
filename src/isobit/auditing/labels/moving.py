"""Labels through views, moves and sorts: the operator itself is applied to the labels, or to their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import EVERY, LOST, Known, Labels, Ledger, Marks
from isobit.auditing.replay.call import form_of, operator_name, tensors_of, unflatten

RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias"}
# Operators that give their first argument's elements in another place, for which labels can stand.
MOVES = {
    "aten::index",
    "aten::index_select",
    "aten::gather",
    "aten::take_along_dim",
    "aten::masked_select",
    "aten::flip",
    "aten::roll",
    "aten::repeat",
    "aten::cat",
    "aten::stack",
    "aten::take",
    "aten::unfold_copy",
}
SORTS = {"aten::sort", "aten::topk", "aten::argsort", "aten::msort"}


class Mover:
    """Compute the marks of results whose elements are those of an argument in other places."""

    def __init__(self, ledger: Ledger) -> None:
        """Keep new labels in this ledger."""
        self.ledger = ledger

    def moved(
        self,
        func: Any,
        flat: list[Any],
        spec: Any,
        results: list[Tensor],
        known: dict[int, Marks],
        copies: bool,
    ) -> list[Known] | None:
        """Apply a view or a move to the labels of its data; None where only an index is labelled."""
        data = self.data_arguments(func, flat)
        sources = [(at, dim) for at in data if at in known for dim in known[at]]
        if not sources:
            return None
        dims = {dim for _, dim in sources}
        found: list[Known] = [{} for _ in results]
        for wanted in dims:
            stand_in = list(flat)
            for at in data:
                tensor = flat[at]
                marks = known.get(at, {})
                labels = marks[wanted].values if wanted in marks else None
                stand_in[at] = spread(tensor, wanted, labels, untouched(func, flat, wanted))
            args, kwargs = unflatten(func, stand_in, spec)
            try:
                moved = tensors_of(func(*args, **kwargs))
            except (RuntimeError, NotImplementedError, IndexError):
                return [LOST for _ in results]
            for at, labels_out in enumerate(moved):
                so_far = found[at]
                new = self.read(labels_out, results[at].shape, copies, wanted)
                if isinstance(so_far, str) or isinstance(new, str) or so_far.keys() & new.keys():
                    found[at] = LOST
                else:
                    so_far.update(new)
        return found

    def data_arguments(self, func: Any, flat: list[Any]) -> list[int]:
        """Return which arguments hold the elements that are moved: the first tensor, or all of a list of tensors."""
        tensors = [at for at, v in enumerate(flat) if isinstance(v, Tensor)]
        many = operator_name(func) in ("aten::cat", "aten::stack")
        return tensors if many else tensors[:1]

    def read(self, labels: Tensor, shape: Sequence[int], copies: bool, wanted: int) -> Known:
        """Return the labels of the one dimension over which they vary.

        Args:
            labels: Labels after the move.
            shape: The shape of the moved tensor.
            copies: Whether the move copies, so that strides say nothing.
            wanted: The dimension over which labels varied before.
        """
        if labels.numel() == 0:
            return {}
        moving = [d for d in range(labels.dim()) if labels.stride(d) and labels.shape[d] > 1]
        if len(moving) == 1 and not copies:  # a view of a vector: all other strides are zero
            line = labels[at_origin(labels.dim(), moving[0])]
            varying = moving if bool((line != line[0]).any()) else []
        else:
            varying = [d for d in moving if not bool((labels == labels.narrow(d, 0, 1)).all())]
        if len(varying) > 1:
            return LOST
        if not varying:
            value = int(labels.reshape(-1)[0])
            return {} if value < 0 or labels.dim() == 0 else self.single(shape, value, wanted)
        vector = labels[at_origin(labels.dim(), varying[0])]
        return {varying[0]: self.ledger.vector(vector)}

    def single(self, shape: Sequence[int], value: int, wanted: int) -> Known:
        """Return marks where every element has one label: along a dimension of size one, if there is one."""
        ones = [dim for dim, size in enumerate(shape) if size == 1]
        dim = wanted if wanted in ones else ones[0] if ones else 0
        return {dim: self.ledger.vector(torch.full((shape[dim],), value))}

    def strided(self, before: Tensor, after: Tensor, marks: Marks) -> Known:
        """Return the marks of a view with given strides, by the label of every element of the storage."""
        size = before.untyped_storage().nbytes() // before.element_size()
        found: Marks = {}
        for dim, labels in marks.items():
            storage = torch.full((size,), EVERY)
            view = storage.as_strided(before.shape, before.stride(), before.storage_offset())
            view.copy_(spread(view, dim, labels.values, set()))
            moved = storage.as_strided(after.shape, after.stride(), after.storage_offset())
            new = self.read(moved, after.shape, True, dim)
            if isinstance(new, str) or any(d in found for d in new):
                return LOST
            found.update(new)
        return found

    def reshaped(self, before: Sequence[int], after: Sequence[int], marks: Marks) -> Known:
        """Return the marks of the same elements in another shape."""
        found: Marks = {}
        for dim, labels in marks.items():
            inner = product(before[dim + 1 :])  # elements in one step of this dimension
            placed = self.place_in(labels, inner, after)
            if placed is None or placed[0] in found:
                return LOST
            found[placed[0]] = placed[1]
        return found

    def place_in(
        self, labels: Labels, inner: int, after: Sequence[int]
    ) -> tuple[int, Labels] | None:
        """Find the dimension of a new shape over which labels vary, and their values there."""
        n = len(labels)
        varying: list[tuple[int, Tensor]] = []
        for dim, size in enumerate(after):
            step = product(after[dim + 1 :])
            if size == 1 or step * size <= inner or step >= inner * n:
                continue  # inside one label, or outside all of them
            # The label of flat element f is values[(f // inner) % n].
            flat = torch.arange(size) * step
            along = labels.values[(flat // inner) % n]
            if inner % step and step % inner:
                return None
            if bool((along != along[0]).any()):
                varying.append((dim, along))
        if len(varying) > 1:
            return None
        if varying:
            return varying[0][0], self.ledger.vector(varying[0][1])
        ones = [dim for dim, size in enumerate(after) if size == 1]
        if n == 1 and ones:
            return ones[0], labels
        fits = [d for d, size in enumerate(after) if product(after[d + 1 :]) == inner and size == n]
        return (fits[0], labels) if fits else None

    def padded(
        self, before: Sequence[int], after: Sequence[int], marks: Marks, flat: list[Any]
    ) -> Marks:
        """Return the marks of a padded tensor; what was added belongs to every row."""
        pads = [v for v in flat[1:-1] if isinstance(v, int)]  # from the last dimension to the first
        found: Marks = {}
        for dim, labels in marks.items():
            at = 2 * (len(before) - 1 - dim)
            low = pads[at] if at < len(pads) else 0
            if after[dim] == before[dim] or low < 0 or after[dim] < before[dim] + low:
                found[dim] = labels
                continue
            values = torch.full((after[dim],), EVERY)
            values[low : low + before[dim]] = labels.values
            found[dim] = self.ledger.vector(values)
        return found

    def sorted(
        self, func: Any, flat: list[Any], results: list[Tensor], marks: Marks
    ) -> list[Known]:
        """Return the marks of sorted values and their indices: labels move with the values."""
        where = results[-1] if results[-1].dtype == torch.int64 else None
        along = sorted_dimension(func, flat)
        found: list[Known] = []
        for result in results:
            new: Marks = {}
            for dim, labels in marks.items():
                if where is None or result.dim() != flat_dim(flat):
                    return [LOST for _ in results]
                if dim != along:
                    new[dim] = labels
                    continue
                order = where.movedim(dim, -1).reshape(-1, where.shape[dim]).cpu()
                if len(order) != 1:
                    return [LOST for _ in results]
                new[dim] = self.ledger.vector(labels.values[order[0]])
            found.append(new)
        return found

    def nonzero(self, tensor: Tensor, where: Tensor, marks: Marks) -> Known:
        """Return the labels of the coordinates of elements that are not zero."""
        if len(marks) != 1:
            return LOST
        ((dim, labels),) = marks.items()
        return {0: self.ledger.vector(labels.values[where[:, dim].cpu()])} if len(where) else {}


def at_origin(dims: int, dim: int) -> tuple[int | slice, ...]:
    """Return the index of the line along a dimension that goes through the first element."""
    return tuple(slice(None) if d == dim else 0 for d in range(dims))


def put_back(name: str, dims: int, flat: list[Any], marks: Marks) -> Marks:
    """Return the marks of the gradient of a slice or a selection, in the shape of what it was taken from."""
    numbers = [v for v in flat[1:] if isinstance(v, int)]
    taken = name == "aten::select_backward"
    whole = dims + taken  # the sizes come first, then the dimension
    at = numbers[whole] % whole
    if taken:
        return {dim + (dim >= at): labels for dim, labels in marks.items()}
    return {dim: labels for dim, labels in marks.items() if dim != at}


def spread(tensor: Tensor, dim: int, labels: Tensor | None, untouched: set[int]) -> Tensor:
    """Return labels in the shape of a tensor, -1 where there are none; untouched dimensions have size one."""
    sizes = [1 if d in untouched else size for d, size in enumerate(tensor.shape)]
    if labels is None:
        return torch.full((1,), -1, dtype=torch.int64, device=tensor.device).expand(sizes)
    shape = [1] * tensor.dim()
    shape[dim] = -1
    return labels.to(tensor.device).view(shape).expand(sizes)


def untouched(func: Any, flat: list[Any], wanted: int) -> set[int]:
    """Return the dimensions that a move leaves alone, so that one step of each is enough to move labels."""
    name = operator_name(func)
    dims = set(range(flat_dim(flat)))
    if name == "aten::index":
        return {d for d in dims if d >= len(flat) - 1 or flat[d + 1] is None} - {wanted}
    if name in ("aten::cat", "aten::index_select"):
        given = flat[-1] if name == "aten::cat" else flat[1]
        return dims - {wanted, (given if isinstance(given, int) else 0) % max(len(dims), 1)}
    return set()


def product(sizes: Sequence[int]) -> int:
    """Multiply sizes."""
    total = 1
    for size in sizes:
        total *= size
    return total


def flat_dim(flat: list[Any]) -> int:
    """Return the number of dimensions of the first tensor."""
    return next(v.dim() for v in flat if isinstance(v, Tensor))


def sorted_dimension(func: Any, flat: list[Any]) -> int:
    """Return the dimension along which an operator sorts."""
    names, _, _ = form_of(func)
    given = flat[names.index("dim")] if "dim" in names else -1
    return (given if isinstance(given, int) else -1) % max(flat_dim(flat), 1)
