"""The current folder, each rank its own: `os.chdir` on a rank holds for that rank's turns alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program.clock import replaced

change = os.chdir  # kept here: inside a world it is replaced
_before = ""  # where the process was before a rank first moved
_now = ""  # where it is since


def move(path: Any) -> None:
    """What `os.chdir` is inside a world."""
    global _before, _now
    before = os.getcwd()
    change(path)
    if ranks.has_baton():
        _before, _now = _before or before, os.getcwd()
        ranks.current().folder = _now


def restore_folder(rank: ranks.Rank) -> None:
    """As the rank takes its turn: puts the process where the rank was; costs nothing until a rank moves."""
    global _now
    if _now and (rank.folder or _before) != _now:
        with suppress(OSError):  # it may be gone by now, as it may be for a process
            change(rank.folder or _before)
            _now = rank.folder or _before


@contextmanager
def folder_per_rank() -> Iterator[None]:
    """While it is open, ranks have folders of their own; then the process is back where it was."""
    global _before, _now
    try:
        with replaced(os, "chdir", move):
            yield
    finally:
        if _before:
            change(_before)
        _before = _now = ""
