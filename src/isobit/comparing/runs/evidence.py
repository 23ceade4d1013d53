"""What a run knows about the usual causes: random states, threads, variables, versions and files that it read.

Nothing is configured by the variables that are read here: both runs see the same, and a difference is reported by name.
Values are hashed, since some are secrets.
"""

from __future__ import annotations

import os
import random
import stat
import sys
from typing import Any

import torch
from blake3 import blake3

MOST_FILES = 50


def short(data: bytes) -> str:
    """Return a short digest."""
    return blake3(data).hexdigest()[:16]


def random_states() -> dict[str, str]:
    """Return digests of the states of the global random number generators."""
    found = {"torch": short(torch.get_rng_state().numpy().tobytes())}
    found["random"] = short(repr(random.getstate()).encode())
    if "numpy" in sys.modules:
        import numpy

        found["numpy"] = short(repr(numpy.random.get_state(legacy=False)).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = [state.cpu().numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
        found["torch.cuda"] = short(b"".join(states))
    return found


def surroundings() -> dict[str, Any]:
    """Return thread counts, variables and versions of loaded packages."""
    versions = {}
    for name, module in list(sys.modules.items()):
        version = None if "." in name else getattr(module, "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "variables": {
            name: short(value.encode(errors="replace")) for name, value in os.environ.items()
        },
        "versions": versions,
    }


class FilesRead:
    """Files that this run reads and that changed after the first run had begun: what the first run left behind."""

    def __init__(self, began: float, ours: float) -> None:
        """Note files that changed between `began` and `ours`, times since the epoch."""
        self.began, self.ours = began, ours
        self.paths: list[str] = []
        self.inside = False

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at a file that is opened for reading; called by the interpreter."""
        if event != "open" or self.inside or len(self.paths) >= MOST_FILES:
            return
        path, mode, flags = (*arguments, None, None, None)[:3]
        if not isinstance(path, str | bytes) or (isinstance(mode, str) and set(mode) & set("wax")):
            return
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_CREAT):
            return
        self.inside = True
        try:
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode) and self.began <= found.st_mtime < self.ours:
                name = os.path.abspath(os.fsdecode(path))
                if name not in self.paths and "/__pycache__/" not in name:
                    self.paths.append(name)
        except (OSError, ValueError):
            pass
        finally:
            self.inside = False
