"""Follow labels through the operators of a run; see [Note: labels] in labels.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import (
    EVERY,
    LOST,
    MIXED,
    Known,
    Labels,
    Ledger,
    Marks,
    Rows,
    select,
)
from isobit.auditing.labels.moving import MOVES, RESHAPES, SORTS, Mover, put_back
from isobit.auditing.replay.call import operator_name, results_of, unflatten, written_by
from isobit.auditing.replay.merging import MIXED_OURS, is_ours

# Labels of tensors that are made from sizes and filled by index: gradients of `x[index]`, sums of experts' tokens.
#
# Such a tensor is zeros or empty at first, and several labels may fit its size. Which of them is right shows when
# rows are written to it by index: a position has the label of the row that is written there. That holds also for a
# tensor that was made like one with rows (`zeros_like(y)` before `z[order] = y`): it has their number, not their
# order.

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


# Labels by size: labelled dimensions get other sizes, and the dimensions of the results that change with them show.


class Sizer:
    """Compute the marks of results from sizes."""

    def __init__(
        self, ledger: Ledger, variants: Sequence[Rows], mixes: bool, fixed_sizes: Collection[int]
    ) -> None:
        """Keep what `Follower` was given."""
        self.ledger, self.variants, self.mixes = ledger, variants, mixes
        self.fixed_sizes = fixed_sizes
        self._known: dict[object, list[dict[int, Labels]] | None] = {}

    def by_meta(
        self,
        func: Any,
        flat: list[Any],
        spec: Any,
        results: list[Tensor],
        known: dict[int, Marks],
    ) -> list[Known]:
        """Give labelled dimensions other sizes on the meta device, and see which sizes of the results change."""
        if torch.Tag.pointwise in func.tags and len(results) == 1:
            marks = broadcast(results[0], flat, known)
            if marks is not None:
                return [marks]
        key = (func, tuple(self.key_of(v, known.get(at)) for at, v in enumerate(flat)))
        if key not in self._known:
            self._known[key] = self.resize(func, flat, spec, results, known)
        found = self._known[key]
        if found is None:
            return [by_position(result, flat, known) for result in results]
        mixed = MIXED_OURS if is_ours(func) else MIXED
        return [
            mixed if self.mixes and not marks and result.is_floating_point() else dict(marks)
            for marks, result in zip(found, results, strict=True)
        ]

    def key_of(self, value: Any, marks: Marks | None) -> object:
        """Return what the sizes of a result depend on."""
        if isinstance(value, Tensor):
            marked = tuple((dim, labels.key) for dim, labels in (marks or {}).items())
            return (tuple(value.shape), value.dtype, marked)
        return repr(value)

    def resize(
        self,
        func: Any,
        flat: list[Any],
        spec: Any,
        results: list[Tensor],
        known: dict[int, Marks],
    ) -> list[dict[int, Labels]] | None:
        """Return the marks of the results, or None where the operator cannot be called with other sizes."""
        vectors = {labels.key: labels for marks in known.values() for labels in marks.values()}
        largest = max([*(len(v) for v in vectors.values()), *(s for r in results for s in r.shape)])
        # Multiples of 16, as some kernels ask of strides.
        sizes = {key: 16 * (largest // 16 + 1 + at) for at, key in enumerate(vectors)}
        back = {sizes[key]: labels for key, labels in vectors.items()}
        made = list(flat)
        for at, value in enumerate(flat):
            if isinstance(value, Tensor):
                shape = list(value.shape)
                for dim, labels in known.get(at, {}).items():
                    shape[dim] = sizes[labels.key]
                made[at] = torch.empty(shape, dtype=value.dtype, device="meta")
            elif isinstance(value, torch.device):
                made[at] = torch.device("meta")
        args, kwargs = unflatten(func, made, spec)
        try:
            run = SHAPES.get(operator_name(func), func)
            meta = results_of(func, made, spec, run(*args, **kwargs))
        except Exception:  # an operator may raise anything where it has no meta kernel
            return None
        if len(meta) != len(results):
            return None
        found: list[dict[int, Labels]] = []
        for new, old in zip(meta, results, strict=True):
            if new.dim() != old.dim():
                return None
            changed = {d: new.shape[d] for d in range(old.dim()) if new.shape[d] != old.shape[d]}
            if any(size not in back for size in changed.values()):
                return None
            found.append({dim: back[size] for dim, size in changed.items()})
        return found

    def guess_by_size(self, tensor: Tensor) -> Known:
        """Label dimensions of a tensor that only the audited run makes, such as a mask of padding, by their size.

        A size that a parameter has, too, says nothing; such rows are lost.
        """
        marks: Marks = {}
        for dim, size in enumerate(tensor.shape):
            fitting = self.ledger.of_length(size)
            if size < 2 or not fitting:
                continue
            if size in self.fixed_sizes or len(fitting) > 1:
                return LOST
            marks[dim] = fitting[0]
        return marks

    def add_new_sizes(
        self,
        tensor: Tensor,
        marks: Marks,
        shapes: Sequence[Sequence[int] | None],
        counts: bool = False,
    ) -> Known:
        """Label dimensions that were made from sizes: those whose size differs from the variant's.

        Args:
            tensor: The result.
            marks: What is known of it.
            shapes: Its shape in every call of the variant; None where that call does not make it, as a mask.
            counts: Whether it counts positions: then its rows are in the order of the inputs', where those fit.
        """
        options: dict[int, list[Labels]] = {}
        unsure = False
        known = [
            (rows, shape)
            for rows, shape in zip(self.variants, shapes, strict=False)
            if shape is not None and len(shape) == tensor.dim()
        ]
        for dim, here in enumerate(tensor.shape):
            others = [(rows, shape[dim]) for rows, shape in known if shape[dim] != here]
            if dim in marks or not others:
                continue
            # Where none fits every call of the variant, its program differs in some of them.
            for kept in (others, *([one] for one in others)):
                fitting = [
                    labels
                    for labels in self.ledger.of_length(here)
                    if all(kept_as(labels, rows, size) for rows, size in kept)
                ]
                fitting = [one for one in fitting if counts and one.of_inputs] or fitting
                if fitting:
                    options[dim], marks[dim] = fitting, fitting[0]
                    unsure |= not all(same_kept(fitting, rows, size) for rows, size in kept)
                    break
        if options:
            self.ledger.guess(tensor, options)
        return LOST if unsure else marks

    def as_many(self, marks: Marks) -> dict[int, list[Labels]]:
        """Return for every labelled dimension all labels that keep as many rows."""
        return {
            dim: [
                other
                for other in self.ledger.of_length(len(labels))
                if all(len(other.kept(r)) == len(labels.kept(r)) for r in self.variants)
            ]
            for dim, labels in marks.items()
        }


def broadcast(result: Tensor, flat: list[Any], known: dict[int, Marks]) -> Marks | None:
    """Return the marks of an elementwise result; None where a labelled dimension of size one is repeated."""
    found: Marks = {}
    for at, marks in known.items():
        for dim, labels in marks.items():
            place = dim + result.dim() - flat[at].dim()
            if result.shape[place] != len(labels) or found.get(place, labels) is not labels:
                return None
            found[place] = labels
    return found


def kept_as(labels: Labels, rows: Rows, size: int) -> bool:
    """Return whether keeping these rows, or their context, leaves this size."""
    return len(select(labels, rows, size)) == size


def same_kept(fitting: list[Labels], rows: Rows, size: int) -> bool:
    """Return whether several labels keep the same indices, so that either may stand."""
    first = select(fitting[0], rows, size)
    return all(torch.equal(select(other, rows, size), first) for other in fitting[1:])


def by_position(result: Tensor, flat: list[Any], known: dict[int, Marks]) -> Known:
    """Return marks of a result by position, counted from the left and from the right, and by size.

    For operators that cannot be called with other sizes. Rows are lost where the two ways of counting disagree.
    """
    found: Marks = {}
    for at, marks in known.items():
        for dim, labels in marks.items():
            from_left, from_right = dim, result.dim() - (flat[at].dim() - dim)
            fits = {
                d
                for d in (from_left, from_right)
                if 0 <= d < result.dim() and result.shape[d] == len(labels)
            }
            if len(fits) != 1 or found.get(next(iter(fits)), labels) is not labels:
                return LOST
            found[next(iter(fits))] = labels
    return found


def grouped_mm_shape(
    x: Tensor, weight: Tensor, ends: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Return an empty product per group; torch's own meta kernel takes bf16 only."""
    if x.dim() == 2 and weight.dim() == 2 and ends is not None:
        return x.new_empty(len(ends), x.shape[0], weight.shape[1])
    if weight.dim() == 2:
        return x.new_empty(x.shape[1], weight.shape[1])
    return x.new_empty(*x.shape[:-1], weight.shape[-1])


SHAPES = {"aten::_grouped_mm": grouped_mm_shape}


COUNTS = {"aten::histc", "aten::bincount"}  # whole numbers, which are exact in any order
# Operators whose result has sizes that are given as arguments.
SIZED = {"aten::expand", "aten::repeat", "aten::slice_backward", "aten::select_backward"}


class Follower:
    """Compute the marks of results from the marks of arguments."""

    def __init__(
        self,
        ledger: Ledger,
        variants: Sequence[Rows],
        mixes: bool,
        fixed_sizes: Collection[int] = (),
    ) -> None:
        """Follow labels for these rows.

        Args:
            ledger: Where marks are kept.
            variants: The rows of every call of the variant.
            mixes: Whether a sum over a labelled dimension mixes samples.
            fixed_sizes: Sizes of the model's parameters, which are no sizes of the batch.
        """
        self.ledger, self.variants = ledger, variants
        self.mover = Mover(ledger)
        self.sizer = Sizer(ledger, variants, mixes, fixed_sizes)

    def follow(
        self,
        func: Any,
        flat: list[Any],
        spec: Any,
        results: list[Tensor],
        sizes: Sequence[Any] = (),
    ) -> None:
        """Record the marks of the results of one call.

        Args:
            func: The operator.
            flat: Its arguments; a flat list.
            spec: How to put them together.
            results: What it returned or wrote.
            sizes: Shapes of the results of the same call in the variant (one list per call of the variant), if any.
        """
        found = self.marks_of_results(func, flat, spec, results)
        for at, (tensor, marks) in enumerate(zip(results, found, strict=True)):
            shapes = [s[at] if at < len(s) else None for s in sizes]
            if not isinstance(marks, str) and (not marks or operator_name(func) in SIZED):
                if any(shape is not None for shape in shapes):
                    counts = operator_name(func) == "aten::arange"
                    marks = self.sizer.add_new_sizes(tensor, dict(marks), shapes, counts)
                elif not any(isinstance(v, Tensor) for v in flat):
                    marks = self.sizer.guess_by_size(tensor)
            self.ledger.put(tensor, marks)
            if operator_name(func) in LIKES and marks and not isinstance(marks, str):
                self.ledger.guess(tensor, self.sizer.as_many(marks))
        if is_in_place(func) and operator_name(func) not in WRITES_ROWS | FILLS:
            for tensor in results:
                self.ledger.forget_options(tensor)

    def marks_of_results(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor]
    ) -> list[Known]:
        """Return the marks of each result."""
        given = {at: self.ledger.get(v) for at, v in enumerate(flat) if isinstance(v, Tensor)}
        marked = {at: marks for at, marks in given.items() if marks}
        if not marked:
            return [{} for _ in results]
        name = operator_name(func)
        if name in MAKES:
            return [{} for _ in results]
        if name in WRITES_ROWS:
            placed = place_rows(self.ledger, func, flat, given, self.variants)
            if placed is not None:
                return [placed for _ in results]
        if name in MOVES:  # rows go where the index says, whatever is known of the index itself
            data = [at for at in self.mover.data_arguments(func, flat) if at in marked]
            marked = {at: marked[at] for at in data} if data else marked
        lost = next((marks for marks in marked.values() if isinstance(marks, str)), None)
        if lost is not None:
            return [lost for _ in results]
        known: dict[int, Marks] = {at: m for at, m in marked.items() if not isinstance(m, str)}
        first = next((at for at, v in enumerate(flat) if isinstance(v, Tensor)), 0)
        if is_in_place(func):
            return self.in_place(func, flat, spec, results, known)
        if name in RESHAPES:
            return [self.mover.reshaped(flat[first].shape, results[0].shape, known[first])]
        if name == "aten::as_strided":
            return [self.mover.strided(flat[first], results[0], known[first])]
        if func.is_view or name in MOVES:
            moved = self.mover.moved(func, flat, spec, results, known, name in MOVES)
            if moved is not None:
                return moved
        if name in COUNTS:
            return [{} for _ in results]
        if name == "aten::constant_pad_nd":
            return [self.mover.padded(flat[first].shape, results[0].shape, known[first], flat)]
        if name in SORTS:
            return self.mover.sorted(func, flat, results, known.get(first, {}))
        if name in ("aten::slice_backward", "aten::select_backward"):
            return [put_back(name, flat[first].dim(), flat, known[first])]
        if name == "aten::nonzero":
            return [self.mover.nonzero(flat[first], results[0], known[first])]
        return self.sizer.by_meta(func, flat, spec, results, known)

    def in_place(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor], known: dict[int, Marks]
    ) -> list[Known]:
        """Return the marks of arguments that were written to: their own if they had some."""
        own = [[known[at] for at, v in enumerate(flat) if v is r and at in known] for r in results]
        if all(own):
            return [marks[0] for marks in own]
        new = self.sizer.by_meta(func, flat, spec, results, known)
        return [a[0] if a else b for a, b in zip(own, new, strict=True)]


def is_in_place(func: Any) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(written_by(func)[0])
