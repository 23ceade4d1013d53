"""The current folder of each rank: `os.chdir` on one rank does not move the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program.replaced import replaced

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
