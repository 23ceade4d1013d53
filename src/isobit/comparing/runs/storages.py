"""Number the memory of tensors, and know where its contents came from.

[Note: Which inputs are hashed]
Memory that a recorded operator wrote needs no second hash when it is read. Memory from outside (numpy, workers, files)
may change without an operator, so it is hashed at every use, except for parameters, which are hashed once here and
after every optimizer step. Memory of `torch.empty` is hashed when it is read before it was written completely.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MADE, OUTSIDE, EMPTY = "made", "outside", "empty"
MOST = 20_000  # entries after which those of freed memory are dropped


@dataclass
class Memory:
    """One storage: its number in the run, and where its contents came from."""

    alive: StorageWeakRef  # keeps the address from being used again
    number: int
    origin: str


class Storages:
    """All storages that a run has seen; freed ones are forgotten."""

    def __init__(self) -> None:
        """Start with none."""
        self.known: dict[int, Memory] = {}
        self.count = 0
        self.limit = MOST

    def find(self, tensor: torch.Tensor) -> Memory:
        """Return the memory of a tensor; memory that no operator has made is from outside."""
        storage = tensor.untyped_storage()
        found = self.known.get(storage._cdata)
        if found is None:
            found = self._add(storage, OUTSIDE)
        return found

    def made(self, tensor: torch.Tensor, origin: str) -> Memory:
        """Note that an operator returned a tensor, and return its memory."""
        storage = tensor.untyped_storage()
        found = self.known.get(storage._cdata)
        if found is None:
            return self._add(storage, origin)
        whole = tensor.numel() * tensor.element_size() >= storage.nbytes()
        if found.origin == EMPTY and origin == MADE and whole:
            found.origin = MADE
        return found

    def _add(self, storage: torch.UntypedStorage, origin: str) -> Memory:
        if len(self.known) >= self.limit:
            self.known = {k: m for k, m in self.known.items() if not is_freed(m)}
            self.limit = max(MOST, 2 * len(self.known))
        self.count += 1
        alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        found = Memory(alive, self.count, origin)
        self.known[storage._cdata] = found
        return found


def is_freed(memory: Memory) -> bool:
    """Return whether no tensor uses the memory any more."""
    return bool(memory.alive.expired())  # type: ignore[no-untyped-call]
