"""Results over all samples, such as a loss: their operator is guilty only if a sample's rows depend on them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isobit.auditing.judging.findings import Finding


class Totals:
    """The operators whose results mix samples, by the storage of what was computed from them alone."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, list[Finding]]] = {}
        self.open: list[Finding] = []  # those that no sample's rows have met

    def add(self, results: Sequence[Tensor], finding: Finding) -> None:
        """Keep what was found of an operator that mixes samples."""
        self.open.append(finding)
        self._put(results, [finding])

    def pass_on(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note that results were computed from totals."""
        found = self._of(inputs)
        if found:
            self._put(results, found)

    def take(self, inputs: Sequence[Tensor]) -> list[Finding]:
        """Return the operators whose totals are among these inputs, each once."""
        met = [one for one in self._of(inputs) if one in self.open]
        self.open = [one for one in self.open if one not in met]
        return met

    def is_open(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed from totals that no sample's rows have met."""
        return any(one in self.open for one in self._of([tensor]))

    def _of(self, tensors: Sequence[Tensor]) -> list[Finding]:
        if not self._found:
            return []
        found: list[Finding] = []
        for tensor in tensors:
            entry = self._found.get(tensor.untyped_storage()._cdata)
            if entry is not None and not entry[0].expired():  # type: ignore[no-untyped-call]
                found += [one for one in entry[1] if one not in found]
        return found

    def _put(self, tensors: Sequence[Tensor], findings: list[Finding]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._found[storage._cdata] = (StorageWeakRef(storage), findings)  # type: ignore[no-untyped-call]
