"""Judge a guilty call of several results by those that something reads.

Attention also returns a logsumexp and a norm its row statistics, which a forward pass without a backward drops. Whether
a result is read shows only later in the run, so a difference of each result is kept until the run has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isobit.auditing.judging.findings import Comparison, Finding, merge
from isobit.auditing.records import ERROR, Accuracy
from isobit.auditing.replay.call import without_rows


@dataclass(eq=False)
class ByResult:
    """What was found of one call, by result.

    Attributes:
        finding: the call, described by the first result that differs.
        compared: the comparison of every result.
        differ: the kind and the accuracy of every result that differs.
        read: the results that differ and that something reads.
    """

    finding: Finding
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
