"""Write files atomically, and read only regular files of limited size."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

from blake3 import blake3


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents by text, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file's contents in one step, so that neither readers nor crashes see half of it.

    Raises:
        OSError: If it cannot be written; also for a device, a pipe or a folder, which must not be replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; raise OSError for a device, a pipe or a folder."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def read_bytes(path: Path, largest: int) -> bytes:
    """Read a regular file; raise OSError for a device, a pipe, or a file that is too large."""
    with open_regular(path) as file:
        found: bytes = file.read(largest + 1) or b""
    if len(found) > largest:
        raise OSError(f"{path} is larger than {largest:,} bytes")
    return found


# Digests of the files of a folder, so that a truncated or changed file is noticed before it is read.


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
