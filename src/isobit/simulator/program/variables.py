"""Environment variables as a launcher sets them, each rank its own: a program's `os.environ` shows the rank's."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from isobit.simulator import rank as ranks


def launcher_variables(index: int, count: int) -> dict[bytes, bytes]:
    """The process's own, and what torchrun would set on one host."""
    said = {
        "RANK": index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_RANK": index,
        "ROLE_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "TORCHELASTIC_RUN_ID": "isobit",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {**os.environb, **{name.encode(): str(value).encode() for name, value in said.items()}}


class VariablesView(MutableMapping[bytes, bytes]):
    """Stands in for the data of `os.environ`: each rank sees and sets its own variables, others the process's."""

    def __init__(self, plain: dict[bytes, bytes]) -> None:
        self._plain = plain
        self.touched: set[bytes] = set()

    def _data(self) -> dict[bytes, bytes]:
        rank = ranks.owner()
        return self._plain if rank is None else rank.variables

    def __getitem__(self, key: bytes) -> bytes:
        return self._data()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self.touched.add(key)
        self._data()[key] = value

    def __delitem__(self, key: bytes) -> None:
        self.touched.add(key)
        del self._data()[key]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._data())

    def __len__(self) -> int:
        return len(self._data())


@contextmanager
def variables_per_rank() -> Iterator[None]:
    """While it is open, `os.environ` on a rank's thread is that rank's; what ranks set is undone after."""
    kept = os.environ._data  # type: ignore[attr-defined]
    view = VariablesView(kept)
    os.environ._data = view  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.environ._data = kept  # type: ignore[attr-defined]
        for name in view.touched:  # a rank's setting reached the process itself, through putenv
            if name in kept:
                os.putenv(name, kept[name])
            else:
                os.unsetenv(name)
