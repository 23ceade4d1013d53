"""Watch a run on an axis that changes which rows run together: batch, padding, packing, decode, chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.labels.following import Follower, with_written_rows
from isobit.auditing.labels.labels import LOST, Known, Ledger, Marks, Rows
from isobit.auditing.labels.moving import sorted_dimension
from isobit.auditing.records import Place
from isobit.auditing.replay.call import operator_name, without_rows
from isobit.auditing.replay.merging import MIXED_OURS, is_ours
from isobit.auditing.replay.places import Places
from isobit.auditing.replay.replay import (
    Again,
    Entry,
    Key,
    OfParts,
    Replay,
    is_exact,
    is_mask,
)
from isobit.auditing.replay.watching import Judged, Watcher, first_line

RUNNING_TOTALS = {f"aten::{name}" for name in ("cumsum", "cumprod", "logcumsumexp")}


class RowWatcher(Watcher):  # type: ignore[no-untyped-call]
    """Judge calls on an axis that changes which rows run together.

    Args:
        places: Where calls are.
        ledger: The marks of the inputs.
        variants: For every call of the variant: its rows and what was recorded.
        axis: The axis.
        mixes: Whether a sum over a labelled dimension mixes samples: True on the batch axis.
        fixed_sizes: Sizes of the model's parameters.
    """

    def __init__(
        self,
        places: Places,
        ledger: Ledger,
        variants: Sequence[tuple[Rows, dict[Key, Entry]]],
        axis: str,
        mixes: bool,
        fixed_sizes: Collection[int] = (),
    ) -> None:
        super().__init__(places, axis)
        self.mixing_axis = mixes
        # With one call in the variant, a result that mixes samples has one value there, which can take its place.
        mixes = mixes and len(variants) > 1
        self.ledger, self.variants, self.mixes = ledger, variants, mixes
        rows = [r for r, _ in variants]
        self.follower = Follower(ledger, rows, mixes, fixed_sizes)

    def plan(
        self, func: Any, flat: list[Any], spec: Any, key: Key
    ) -> list[tuple[Again, list[Any]]] | str | None:
        """Cut the rows of every call of the variant out of the arguments."""
        entries = [recorded.get(key) for _, recorded in self.variants]
        used = self.only_used(flat, entries)
        given = {at: self.ledger.get(v) for at, v in enumerate(used) if isinstance(v, Tensor)}
        # Totals that meet rows make these rows depend on all samples; what becomes of a number is not known.
        if any(given.values()) or operator_name(func) == "aten::_local_scalar_dense":
            self.findings += self.totals.take([v for v in flat if isinstance(v, Tensor)])
        if all(marks == MIXED_OURS for marks in given.values() if marks):
            return None  # sums that isobit merged before: the variant makes the very same call
        if key[2] and not func.is_view and any(isinstance(marks, str) for marks in given.values()):
            by_part = self.by_parts(func, flat, spec, given)
            if by_part is not None:
                return by_part
        if is_exact(func) or not any(given.values()):
            return None
        given = with_written_rows(self.ledger, func, used, given, self.follower.variants)
        lost = next((marks for marks in given.values() if isinstance(marks, str)), None)
        if lost is not None:
            return lost
        known: dict[int, Marks] = {a: m for a, m in given.items() if m and not isinstance(m, str)}
        found: list[tuple[Again, list[Any]]] = []
        samples = sum(len(rows.labels) for rows, _ in self.variants)
        share = samples if self.mixes and key[2] and is_ours(func) else 0
        for (rows, _), entry in zip(self.variants, entries, strict=True):
            again = Replay(known, [], rows, entry, share)
            try:
                found.append((again, again.arguments(func, flat, spec)))
            except (RuntimeError, IndexError) as error:
                return f"its rows could not be cut: {first_line(error)}"
        return found

    def give_up(self, place: Place, reason: str, results: Sequence[Tensor]) -> None:
        """Record a call without a verdict; what is computed from its results has none either."""
        super().give_up(place, reason, results)
        for result in results:
            if not without_rows([result]):
                self.ledger.put(result, LOST)

    def lose(self, call: Judged) -> None:
        """Mark results without rows as lost: they are no constants, since the variant's have another shape."""
        for result, marks in zip(call.results, call.marks, strict=True):
            if not marks:
                self.ledger.put(result, LOST)

    def by_parts(
        self, func: Any, flat: list[Any], spec: Any, given: dict[int, Known]
    ) -> list[tuple[Again, list[Any]]] | None:
        """Return a call per sample on its parts of sums over samples; None if other arguments have rows."""
        known = {at: self.parts.get(flat[at]) for at, marks in given.items() if marks}
        if not all(parts and len(parts) == len(self.variants) for parts in known.values()):
            return None
        found: list[tuple[Again, list[Any]]] = []
        for number in range(len(self.variants)):
            again = OfParts({at: parts[number] for at, parts in known.items() if parts})
            found.append((again, again.arguments(func, flat, spec)))
        return found

    def follow(
        self, func: Any, flat: list[Any], spec: Any, results: list[Tensor], key: Key
    ) -> list[Known]:
        """Follow the rows through the call."""
        entries = [recorded.get(key) for _, recorded in self.variants]
        sizes = [entry.results if entry is not None else [] for entry in entries]
        self.follower.follow(func, self.only_used(flat, entries), spec, results, sizes)
        marks = [self.ledger.get(r) for r in results]
        if not any(marks):
            self.totals.pass_on([v for v in flat if isinstance(v, Tensor)], results)
        return marks

    def adds_along_rows(self, call: Judged) -> bool:
        """Return whether a call is a running total over positions."""
        if self.mixing_axis or operator_name(call.func) not in RUNNING_TOTALS:
            return False
        dim = sorted_dimension(call.func, call.flat)
        return any(not isinstance(marks, str) and dim in marks for marks in call.marks)

    def is_total(self, call: Judged) -> bool:
        """Return whether samples were mixed and none of the results has rows."""
        return self.mixing_axis and not call.place.backward and not any(call.marks)

    def only_used(self, flat: list[Any], entries: Sequence[Entry | None]) -> list[Any]:
        """Return the arguments without those that no call of the variant has, such as a mask of padding.

        A mask of attention whose rows are lost is left out, too, where every call of the variant has one: the replay
        takes the variant's own, bit for bit.
        """
        known = [e.flat for e in entries if e is not None and len(e.flat) == len(flat)]
        if not known or len(known) < len(entries):
            return flat
        return [
            None
            if all(k[at] is None for k in known)
            or (
                is_bool_mask(v)
                and isinstance(self.ledger.get(v), str)
                and all(is_bool_mask(k[at]) for k in known)
            )
            else v
            for at, v in enumerate(flat)
        ]


def is_bool_mask(value: Any) -> bool:
    """Return whether a value says which keys each query sees, [batch, 1, queries, keys]."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and is_mask(value)
