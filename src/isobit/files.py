"""Writes files whole or not at all; reads only files that have an end."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace the contents of a file atomically: no reader, and no crash, leaves half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_bytes(path: Path, largest: int) -> bytes:
    """Return the bytes of a regular file; raise OSError for a device, a pipe, or a file larger than `largest`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no regular file")
        found: bytes = file.read(largest + 1) or b""
    if len(found) > largest:
        raise OSError(f"{path} is larger than {largest:,} bytes")
    return found
