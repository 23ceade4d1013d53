"""The key-value store of the rendezvous, whose waits pass the baton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from isobit.simulator.program import waits
from isobit.simulator.rank import current

TorchStore: Any = vars(dist)["Store"]


@dataclass(eq=False)
class KeyWait:
    """The wait of a rank for keys, which any other rank may set."""

    keys: list[str]
    others: list[int]

    def describe(self) -> str:
        """Return the wait in words."""
        return f"the store for {', '.join(map(repr, self.keys))}"

    def missing(self) -> Iterable[int]:
        """Return the other ranks."""
        return self.others


class RankStore(TorchStore):  # type: ignore[misc]
    """A dictionary that all ranks of a run share, with the methods of `torch.distributed.Store`."""

    def __init__(self) -> None:
        """Make an empty store."""
        super().__init__()
        self._kept: dict[str, bytes] = {}
        self._waiting: list[tuple[int, KeyWait]] = []

    @override
    def set(self, key: str, value: str | bytes) -> None:
        self._kept[key] = value.encode() if isinstance(value, str) else bytes(value)
        for entry in list(self._waiting):
            rank, waiting = entry
            if self._has(waiting.keys):
                self._waiting.remove(entry)
                setter = current()
                setter.schedule.wake_from(waiting, rank, setter.clock)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._kept[key]

    @override
    def add(self, key: str, amount: int) -> int:
        total = int(self._kept.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    @override
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._kept.get(key, b"") == wanted:
            self.set(key, desired)
        return self._kept.get(key, wanted)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._kept for key in keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the keys are set; if not, other strands run first, as the program will ask again."""
        if not self._has(keys):
            waits.poll(f"{', '.join(map(repr, keys))} in the store")
        return self._has(keys)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        rank = current()
        if not self._has(keys):
            entry = (rank.index, KeyWait(list(keys), rank.others))
            self._waiting.append(entry)
            if not waits.wait(entry[1], None if timeout is None else timeout.total_seconds()):
                self._waiting.remove(entry)
                raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")

    @override
    def deleteKey(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    delete_key = deleteKey

    @override
    def getNumKeys(self) -> int:
        waits.spin(id(self), "the number of keys in the store")
        return len(self._kept)

    num_keys = getNumKeys
