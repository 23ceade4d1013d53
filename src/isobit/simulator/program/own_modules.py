"""State of modules that each rank owns, as each process would: the script's own modules, and what libraries keep.

A module in the script's folder is imported by every rank for itself. Modules of libraries are shared, since importing
torch once per rank would take too long; of them, the state in `LIBRARIES` is each rank's own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

# Dictionaries in which libraries keep the state of the process: module, class, attribute.
LIBRARIES = tuple(
    ("accelerate.state", name, "_shared_state")
    for name in ("PartialState", "AcceleratorState", "GradientState")
)
# Python's locks of modules that are being imported: a rank may pass the baton during an import.
locks: dict[str, Any] = vars(importlib._bootstrap)["_module_locks"]


@dataclass
class Kept:
    """What one rank owns while another rank runs."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    locks: dict[str, Any] = field(default_factory=dict)
    libraries: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)


class Folder:
    """The modules that were imported from a folder since this was made."""

    def __init__(self, path: str) -> None:
        """Start with none."""
        self.path = path.rstrip(os.sep) + os.sep
        self.names: set[str] = set()
        self.seen = set(sys.modules)
        self.size = len(sys.modules)

    def look(self) -> set[str]:
        """Return the names of the folder's modules."""
        if len(sys.modules) != self.size:
            new = sys.modules.keys() - self.seen
            self.seen |= new
            self.names |= {name for name in new if self.has(sys.modules[name])}
            self.size = len(sys.modules)
        return self.names

    def has(self, module: Any) -> bool:
        """Return whether a module's file is in the folder, and not of a package that is installed in it."""
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
        return str(path).startswith(self.path) and "site-packages" not in str(path)


_folders: list[Folder] = []


@contextmanager
def modules_of(folder: str) -> Iterator[None]:
    """Give each rank its own modules of a folder; afterwards they are forgotten."""
    _folders.append(Folder(folder))
    try:
        yield
    finally:
        for name in _folders.pop().look():
            sys.modules.pop(name, None)


def shared_states() -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield the state of each library that is loaded."""
    for key in LIBRARIES:
        owner = getattr(sys.modules.get(key[0]), key[1], None)
        state = getattr(owner, key[2], None)
        if isinstance(state, dict):
            yield key, state


def save() -> Kept:
    """Return what the current rank owns."""
    names = _folders[-1].look() if _folders else set()
    return Kept(
        {name: sys.modules[name] for name in names if name in sys.modules},
        {name: locks.pop(name) for name in names if name in locks},
        {key: dict(state) for key, state in shared_states()},
    )


def restore(kept: Kept) -> None:
    """Make what a rank owns the current state of the process."""
    for key, state in shared_states():
        state.clear()
        state.update(kept.libraries.get(key, {}))
    if not _folders:
        return
    for name in _folders[-1].look():
        if name in kept.modules:
            sys.modules[name] = kept.modules[name]
        else:
            sys.modules.pop(name, None)
    _folders[-1].size = len(sys.modules)
    locks.update(kept.locks)
