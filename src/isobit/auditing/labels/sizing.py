"""Labels by size: labelled dimensions get other sizes, and the dimensions of the results that change with them show."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.labels import LOST, MIXED, Known, Labels, Ledger, Marks, Rows
from isobit.auditing.replay.call import operator_name, results_of, unflatten
from isobit.auditing.replay.merging import MIXED_OURS, is_ours


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

    def add_new_sizes(self, tensor: Tensor, marks: Marks, shapes: Sequence[Sequence[int]]) -> Known:
        """Label dimensions that were made from sizes: those whose size differs from the variant's."""
        options: dict[int, list[Labels]] = {}
        unsure = False
        for rows, shape in zip(self.variants, shapes, strict=False):
            if len(shape) != tensor.dim():
                continue
            for dim, (here, there) in enumerate(zip(tensor.shape, shape, strict=True)):
                if here == there or dim in marks:
                    continue
                fitting = [v for v in self.ledger.of_length(here) if kept_as(v, rows, there)]
                if not fitting:
                    continue  # the variant's program differs here, but not in the rows
                options[dim] = fitting
                marks[dim] = fitting[0]
                unsure |= not same_kept(fitting, rows)
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
    if len(labels.kept(rows)) == size:
        return True
    return rows.context is not None and len(labels.kept(rows.context)) == size


def same_kept(fitting: list[Labels], rows: Rows) -> bool:
    """Return whether several labels keep the same indices, so that either may stand."""
    return bool(fitting) and all(
        torch.equal(f.kept(rows), fitting[0].kept(rows)) for f in fitting[1:]
    )


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
