"""Record a run of the variant: for every call its sizes and its scalar arguments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.auditing.replay.call import describe, flatten, operator_name, results_of, without_rows
from isobit.auditing.replay.places import Places

NO_ROWS = "a tensor without rows"  # is kept of a sparse or nested tensor
SMALL = 1 << 20  # elements of integer tensors that are kept whole
Key = tuple[str, str, bool, int]  # module, operator, backward, number of the call among these


@dataclass(frozen=True)
class Entry:
    """One call of the variant. Tensors that say where rows are (integers, masks) are kept, others only described."""

    func: Any
    flat: list[Any]
    spec: Any
    results: list[tuple[int, ...]]
    rounds: bool  # whether it returns floating-point numbers


class Numbering:
    """Number the calls of a run, all of them and those of one operator in one module."""

    def __init__(self, places: Places) -> None:
        self.places, self.calls = places, 0
        self._counts: Counter[tuple[str, str, bool]] = Counter()

    def next(self, func: Any) -> tuple[Any, Key]:
        """Return the place of the call that is being dispatched, and its key."""
        place = self.places.find(operator_name(func), self.calls)
        self.calls += 1
        group = (place.module, place.operator, place.backward)
        number = self._counts[group]
        self._counts[group] += 1
        return place, (*group, number)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every call while it is active."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbering = Numbering(places)
        self.entries: dict[Key, Entry] = {}
        self.read: set[Key] = set()  # calls of the backward pass whose results are read by others
        self._made_by: dict[int, Key] = {}  # by storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call and record it."""
        flat, spec = flatten(func, args, kwargs or {})
        known = [keep(v) for v in flat]
        out = func(*args, **(kwargs or {}))
        _, key = self.numbering.next(func)
        results = results_of(func, flat, spec, out)
        if key[2] and not without_rows([*flat, *results]):
            self.note_reads(func, key, flat, results)
        rounds = any(r.is_floating_point() for r in results)
        shapes = [] if without_rows(results) else [tuple(r.shape) for r in results]
        self.entries[key] = Entry(func, known, spec, shapes, rounds)
        return out

    def note_reads(self, func: Any, key: Key, flat: list[Any], results: list[Tensor]) -> None:
        """Note which calls made what is read here, as the gradients of a weight that is used twice are."""
        if func.is_view:
            return
        given = [v for v in flat if isinstance(v, Tensor)]
        made = [self._made_by.get(v.untyped_storage()._cdata) for v in given]
        self.read.update(one for one in made if one is not None)
        self._made_by.update((r.untyped_storage()._cdata, key) for r in results)


def keep(value: Any) -> Any:
    """Return a small integer tensor or a mask itself, the spec of any other tensor, and other values as they are."""
    if without_rows([value]):
        return NO_ROWS
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and value.numel() <= SMALL
        return value if whole or is_mask(value) else describe([value])[0]
    return value


def is_mask(value: Tensor) -> bool:
    """Return whether a tensor has the shape of an attention mask: [batch, heads or 1, queries, keys]."""
    return value.dim() == 4 and value.shape[1] == 1
