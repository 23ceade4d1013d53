"""The key-value store that ranks rendezvous through: waits by passing the baton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from isobit.simulator.program import waits
from isobit.simulator.rank import current

if TYPE_CHECKING:
    from isobit.simulator.world import World

TorchStore: Any = vars(dist)["Store"]


@dataclass(eq=False)
class KeyWait:
    """A rank that waits for keys; any rank still running may set them."""

    keys: list[str]
    others: list[int]

    def describe(self) -> str:
        return f"the store for {', '.join(map(repr, self.keys))}"

    def missing(self) -> Iterable[int]:
        return self.others


class RankStore(TorchStore):  # type: ignore[misc]
    """A dictionary shared by all ranks of a world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._kept = world, dict[str, bytes]()
        self._waiting: list[tuple[int, KeyWait]] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._kept[key] = value.encode() if isinstance(value, str) else bytes(value)
        for entry in list(self._waiting):
            rank, waiting = entry
            if self._has(waiting.keys):
                self._waiting.remove(entry)
                self._world.schedule.wake_from(
                    waiting, rank, self._world.schedule.clocks[current().index]
                )

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._kept[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._kept.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if self._kept.get(key, b"") == wanted:
            self.set(key, desired)
        return self._kept.get(key, wanted)

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._kept for key in keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the keys are there; if not, others get their turn, since the program will ask again."""
        if not self._has(keys):
            waits.poll(f"{', '.join(map(repr, keys))} in the store")
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        rank = current()
        if not self._has(keys):
            others = [other.index for other in self._world.members if other is not rank]
            entry = (rank.index, KeyWait(list(keys), others))
            self._waiting.append(entry)
            if not waits.wait(entry[1], None if timeout is None else timeout.total_seconds()):
                self._waiting.remove(entry)
                raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")

    def deleteKey(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    delete_key = deleteKey

    def getNumKeys(self) -> int:
        waits.spin(id(self), "the number of keys in the store")
        return len(self._kept)

    num_keys = getNumKeys
