"""The environment of each rank: variables as torchrun sets them, and a current folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program.process_state import replaced

# Environment variables of each rank, as torchrun sets them.


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


# The current folder of each rank: `os.chdir` on one rank does not move the others.

real_chdir = os.chdir  # saved: it is replaced during a run
_before = ""  # the folder of the process before a rank first changed it
_now = ""  # its folder since then


def change_folder(path: Any) -> None:
    """Change the folder of the process and remember it for the rank; replaces `os.chdir`."""
    global _before, _now
    before = os.getcwd()
    real_chdir(path)
    if ranks.has_baton():
        _before, _now = _before or before, os.getcwd()
        ranks.current().folder = _now


def restore_folder(rank: ranks.Rank) -> None:
    """Change to the folder of a rank that gets the baton; free until a rank calls `os.chdir`."""
    global _now
    if _now and (rank.folder or _before) != _now:
        with suppress(OSError):  # the folder may have been deleted
            real_chdir(rank.folder or _before)
            _now = rank.folder or _before


@contextmanager
def folder_per_rank() -> Iterator[None]:
    """Give each rank a folder of its own, and restore that of the process afterwards."""
    global _before, _now
    try:
        with replaced(os, "chdir", change_folder):
            yield
    finally:
        if _before:
            real_chdir(_before)
        _before = _now = ""
