"""Follow labels through the operators of a run; see [Note: labels] in labels.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from isobit.auditing.labels.labels import Known, Ledger, Marks, Rows
from isobit.auditing.labels.moving import MOVES, RESHAPES, SORTS, Mover, put_back
from isobit.auditing.labels.placing import FILLS, LIKES, MAKES, WRITES_ROWS, place_rows
from isobit.auditing.labels.sizing import Sizer
from isobit.auditing.replay.call import operator_name, written_by

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
            shapes = [s[at] for s in sizes if at < len(s)]
            if not isinstance(marks, str) and (not marks or operator_name(func) in SIZED):
                if shapes:
                    marks = self.sizer.add_new_sizes(tensor, dict(marks), shapes)
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
