"""Make packages of one folder importable by name, without putting the folder on the search path.

[Note: The current folder]
A folder on `sys.path` serves every import of the process: torch, transformers and the standard library import dozens
of packages if they are installed (dill, opt_einsum, pandas), so the author of the folder could run code in every
command. Instead a finder at the end of `sys.meta_path` answers only for the names that the caller trusts; installed
packages come first. Processes that a command starts get PYTHONSAFEPATH, or Python would put the current folder first
on their path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

SAFE_PATH = "PYTHONSAFEPATH"  # of Python 3.11 and later


class TrustedFolder(MetaPathFinder):
    """Finds some top-level packages in one folder; Python finds submodules by their `__path__`."""

    def __init__(self, folder: str, names: Iterable[str]) -> None:
        self.folder, self.names = folder, frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for a trusted top-level name; leave every other to the other finders."""
        return (
            PathFinder.find_spec(fullname, [self.folder])
            if path is None and fullname in self.names
            else None
        )


def serve_folder(names: Iterable[str], folder: str | None = None) -> None:
    """Make packages of a folder (default: the current one) importable, after everything that is installed."""
    if not (names := tuple(names)):
        return
    finder = TrustedFolder(os.path.abspath(folder or os.getcwd()), names)
    known = [f for f in sys.meta_path if isinstance(f, TrustedFolder) and f.folder == finder.folder]
    if any(finder.names <= f.names for f in known):
        return
    sys.meta_path.append(finder)


def find_in_folder(name: str) -> ModuleSpec | None:
    """Find a package's source in the current folder, for reading; nothing becomes importable."""
    try:
        return PathFinder.find_spec(name, [os.getcwd()])
    except (OSError, ImportError, ValueError):
        return None


@contextmanager
def guarded_path(processes: bool = True) -> Iterator[None]:
    """Remove served folders at the end; with `processes`, keep the current folder off their path."""
    finders, before = list(sys.meta_path), os.environ.get(SAFE_PATH)
    if processes:
        os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        sys.meta_path[:] = [
            f for f in sys.meta_path if f in finders or not isinstance(f, TrustedFolder)
        ]
        if before is None:
            os.environ.pop(SAFE_PATH, None)
        else:
            os.environ[SAFE_PATH] = before
