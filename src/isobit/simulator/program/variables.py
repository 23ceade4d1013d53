"""Environment variables of each rank, as torchrun sets them."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from isobit.simulator import rank as ranks


def launcher_variables(index: int, count: int) -> dict[bytes, bytes]:
    """Return the variables of the process and those that torchrun sets on one host."""
    launched = {
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
    return {
        **os.environb,
        **{name.encode(): str(value).encode() for name, value in launched.items()},
    }


class VariablesView(MutableMapping[bytes, bytes]):
    """Replaces the data of `os.environ`: each rank reads and sets its own variables."""

    def __init__(self, plain: dict[bytes, bytes]) -> None:
        """Show the given variables to threads that are no ranks."""
        self._plain = plain
        self.touched: set[bytes] = set()

    def _data(self) -> dict[bytes, bytes]:
        rank = ranks.owner()
        return self._plain if rank is None else rank.variables

    def __getitem__(self, key: bytes) -> bytes:
        """Return a variable."""
        return self._data()[key]

    def __setitem__(self, key: bytes, value: bytes) -> None:
        """Set a variable."""
        self.touched.add(key)
        self._data()[key] = value

    def __delitem__(self, key: bytes) -> None:
        """Delete a variable."""
        self.touched.add(key)
        del self._data()[key]

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the names."""
        return iter(self._data())

    def __len__(self) -> int:
        """Return the number of variables."""
        return len(self._data())


@contextmanager
def variables_per_rank() -> Iterator[None]:
    """Give each rank an `os.environ` of its own; what ranks set is undone afterwards."""
    kept = os.environ._data  # type: ignore[attr-defined]
    view = VariablesView(kept)
    os.environ._data = view  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.environ._data = kept  # type: ignore[attr-defined]
        for name in view.touched:  # os.environ also called putenv
            if name in kept:
                os.putenv(name, kept[name])
            else:
                os.unsetenv(name)
