"""What differs between two results of one operator: elements, units in the last place, first bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isobit.auditing.records import ERROR, Accuracy, FirstDifference, Place
from isobit.auditing.replay.call import TensorSpec, without_rows
from isobit.bits import as_integers


@dataclass(frozen=True)
class Comparison:
    """Two results of one operator, compared bit for bit."""

    elements: int
    of: int
    ulps: int | None
    largest: float
    first: FirstDifference | None


@dataclass(eq=False)
class GuiltyCall:
    """A guilty call: what differed, and what is needed to call it again with tensors of the same kind.

    Attributes:
        unread: whether nothing reads the results that differ.
    """

    place: Place
    comparison: Comparison
    kind: str
    accuracy: Accuracy
    func: Any
    run: list[Any | TensorSpec]
    variant: list[Any | TensorSpec]
    spec: Any
    unread: bool = False


def compare(run: Tensor, variant: Tensor) -> Comparison:
    """Compare two tensors of one dtype and shape."""
    a, b = as_integers(run), as_integers(variant)
    if torch.equal(a, b):
        return Comparison(0, a.numel(), 0, 0.0, None)
    wrong = (a != b).reshape(-1)
    count = int(wrong.sum())
    if not run.is_floating_point():
        return Comparison(
            count, a.numel(), None, float((run.double() - variant.double()).abs().max()), None
        )
    where = wrong.nonzero().flatten()
    x, y = run.reshape(-1)[where].double(), variant.reshape(-1)[where].double()
    finite = bool(torch.isfinite(x).all() and torch.isfinite(y).all())
    one, other = ranks(a.reshape(-1)[where]), ranks(b.reshape(-1)[where])
    far = float((one.double() - other.double()).abs().max())
    ulps = int((one - other).abs().max()) if far < 2.0**62 else int(far)  # or int64 would overflow
    largest = float((x - y).abs().nan_to_num(nan=float("inf")).max())
    return Comparison(
        count,
        a.numel(),
        ulps if finite else None,
        largest,
        first_of(run, variant, where),
    )


def first_of(run: Tensor, variant: Tensor, where: Tensor) -> FirstDifference:
    """Describe the first element that differs."""
    at = int(where[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), run.shape))
    size = run.element_size()

    def bits(tensor: Tensor) -> str:
        value = int(as_integers(tensor[index].reshape(1))[0]) & ((1 << 8 * size) - 1)
        return f"0x{value:0{2 * size}x}"

    return FirstDifference(
        index, float(run[index]), float(variant[index]), bits(run), bits(variant)
    )


def ranks(bits: Tensor) -> Tensor:
    """Return the position of each number among all numbers of its dtype, from its bits."""
    wide = bits.to(torch.int64)
    lowest = -(1 << (8 * bits.element_size() - 1))
    return torch.where(wide < 0, lowest - wide, wide)


def merge(one: Comparison | None, other: Comparison) -> Comparison:
    """Return both comparisons as one."""
    if one is None:
        return other
    ulps = None if one.ulps is None or other.ulps is None else max(one.ulps, other.ulps)
    return replace(
        one,
        elements=one.elements + other.elements,
        of=one.of + other.of,
        ulps=ulps,
        largest=max(one.largest, other.largest),
        first=one.first or other.first,
    )


# Judge a guilty call of several results by those that something reads.
#
# Attention also returns a logsumexp and a norm its row statistics, which a forward pass without a backward drops.
# Whether a result is read shows only later in the run, so a difference of each result is kept until the run has
# ended.


@dataclass(eq=False)
class ByResult:
    """What was found of one call, by result.

    Attributes:
        finding: the call, described by the first result that differs.
        compared: the comparison of every result.
        differ: the kind and the accuracy of every result that differs.
        read: the results that differ and that something reads.
    """

    finding: GuiltyCall
    compared: dict[int, Comparison]
    differ: dict[int, tuple[str, Accuracy]]
    read: set[int] = field(default_factory=set)

    def settle(self) -> None:
        """Describe the call by the results that something reads, or by all of them if nothing reads any."""
        chosen = [one for at, one in self.differ.items() if at in self.read] or list(
            self.differ.values()
        )
        worst = next((one for one in chosen if one[0] == ERROR), chosen[0])
        self.finding.kind, self.finding.accuracy = worst
        self.finding.unread = not self.read
        total: Comparison | None = None
        for at, comparison in self.compared.items():
            if at in self.read or at not in self.differ or not self.read:
                total = merge(total, comparison)
        if total is not None:
            self.finding.comparison = total


class Reads:
    """Which results of guilty calls are read, by storage."""

    def __init__(self) -> None:
        self.found: list[ByResult] = []
        self._waiting: dict[int, tuple[StorageWeakRef, list[tuple[ByResult, int]]]] = {}

    def wait_for(self, one: ByResult, results: list[Tensor]) -> None:
        """Note from now on who reads the results that differ."""
        self.found.append(one)
        for at in one.differ:
            storage = results[at].untyped_storage()
            known = self._waiting.get(storage._cdata)
            if known is None or known[0].expired():  # type: ignore[no-untyped-call]
                known = self._waiting[storage._cdata] = (StorageWeakRef(storage), [])  # type: ignore[no-untyped-call]
            known[1].append((one, at))

    def note(self, values: Iterable[object]) -> None:
        """Note that a call has these arguments, or that the run returned them."""
        if not self._waiting:
            return
        for value in values:
            if isinstance(value, Tensor) and not without_rows([value]):
                known = self._waiting.pop(value.untyped_storage()._cdata, None)
                if known is not None and not known[0].expired():  # type: ignore[no-untyped-call]
                    for one, at in known[1]:
                        one.read.add(at)

    def settle(self) -> None:
        """Describe every guilty call by what was read, after the run."""
        for one in self.found:
            one.settle()


# Results over all samples, such as a loss: their operator is guilty only if a sample's rows depend on them.


class Totals:
    """The operators whose results mix samples, by the storage of what was computed from them alone."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, list[GuiltyCall]]] = {}
        self.open: list[GuiltyCall] = []  # those that no sample's rows have met

    def add(self, results: Sequence[Tensor], finding: GuiltyCall) -> None:
        """Keep what was found of an operator that mixes samples."""
        self.open.append(finding)
        self._put(results, [finding])

    def pass_on(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note that results were computed from totals."""
        found = self._of(inputs)
        if found:
            self._put(results, found)

    def take(self, inputs: Sequence[Tensor]) -> list[GuiltyCall]:
        """Return the operators whose totals are among these inputs, each once."""
        met = [one for one in self._of(inputs) if one in self.open]
        self.open = [one for one in self.open if one not in met]
        return met

    def is_open(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from totals that no sample's rows have met."""
        return any(one in self.open for one in self._of([tensor]))

    def _of(self, tensors: Sequence[Tensor]) -> list[GuiltyCall]:
        if not self._found:
            return []
        found: list[GuiltyCall] = []
        for tensor in tensors:
            entry = self._found.get(tensor.untyped_storage()._cdata)
            if entry is not None and not entry[0].expired():  # type: ignore[no-untyped-call]
                found += [one for one in entry[1] if one not in found]
        return found

    def _put(self, tensors: Sequence[Tensor], findings: list[GuiltyCall]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._found[storage._cdata] = (StorageWeakRef(storage), findings)  # type: ignore[no-untyped-call]
