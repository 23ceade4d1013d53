"""Digests of the files of a folder, so that a truncated or changed file is noticed before it is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from blake3 import blake3


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the BLAKE3 digest of each named file."""
    found = {}
    for name in names:
        hashed = blake3(max_threads=blake3.AUTO)
        hashed.update_mmap(folder / name)
        found[name] = hashed.hexdigest()
    return found


def first_damaged(folder: Path, expected: Mapping[str, str], names: Iterable[str]) -> str:
    """Return what is wrong with the first of these files that is not as expected, or nothing."""
    for name in names:
        try:
            if digest_files(folder, [name])[name] != expected[name]:
                return f"{name}, whose contents changed after it was saved"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    return ""
