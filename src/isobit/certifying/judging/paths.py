"""Paths of Python files as a certificate shows them: it is read on other machines, too."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2])  # isobit's own


def short_path(path: str) -> str:
    """Return a path from the current folder, from the folder of packages, or else only the file's name.

    Example:
        >>> short_path("/somewhere/site-packages/triton/language/standard.py")
        'triton/language/standard.py'
        >>> short_path("/elsewhere/kernels.py")
        'kernels.py'
    """
    if not os.path.isabs(path):
        return path
    for folder in ("site-packages", "dist-packages"):
        _, found, rest = path.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return rest
    for folder in (os.getcwd(), os.path.dirname(PACKAGE)):
        if path.startswith(os.path.join(folder, "")):
            return os.path.relpath(path, folder)
    return os.path.basename(path)
