"""Check that a command was given a script, before anything else is done."""

from __future__ import annotations

from pathlib import Path

from isobit.errors import ArgumentError


def check_script(path: Path) -> None:
    """Raise ArgumentError if a path is not a file."""
    if not path.is_file():
        raise ArgumentError(
            expected="a Python script",
            received=f"{'a folder' if path.is_dir() else 'no such file'}: {path}",
            remedy="name a script by its path; words after -- go to the script",
        )
