"""Paths of object storage: `s3://bucket/prefix` and other addresses that fsspec can open, with a path's methods.

`place_of(text)` returns a `Path` for a local path and an `Address` otherwise. Packages are imported when an address is
used: `isobit[s3]` has fsspec and s3fs. Options of the storage (keys, endpoints) come from fsspec's own configuration
and the environment variables of the storage's client.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, BinaryIO, cast

from isobit.errors import ArgumentError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


class Address:
    """An address with the methods of a path that readers need: names, listing, whole and partial reads."""

    def __init__(self, address: str) -> None:
        """Take an address such as s3://bucket/prefix."""
        self.address = address.rstrip("/")

    def __str__(self) -> str:
        return self.address

    def __fspath__(self) -> str:
        raise TypeError(f"{self.address} is not a local file")

    def __lt__(self, other: Address) -> bool:
        return self.address < other.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.address}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.address.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """The ending of the name, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> Address:
        """The address without its last part."""
        return Address(self.address.rsplit("/", 1)[0])

    @property
    def storage(self) -> Any:
        """The file system of fsspec that serves this address."""
        return storage_of(self.address.split("://", 1)[0])

    def is_dir(self) -> bool:
        """Return whether there is something below this address."""
        return bool(self.storage.isdir(self.address))

    def exists(self) -> bool:
        """Return whether something is stored here."""
        return bool(self.storage.exists(self.address))

    def iterdir(self) -> list[Address]:
        """Return what is directly below."""
        try:
            found = self.storage.ls(self.address, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        names = (str(one).rstrip("/").rsplit("/", 1)[-1] for one in found)
        return sorted(self / name for name in names if name)

    def glob(self, pattern: str) -> list[Address]:
        """Return what is directly below and matches a pattern of the name."""
        return [one for one in self.iterdir() if Path(one.name).match(pattern)]

    def size(self) -> int:
        """Return the number of bytes stored here."""
        return int(self.storage.info(self.address, refresh=True)["size"])

    def open(self) -> BinaryIO:
        """Open what is stored here for reading; parts are fetched when they are read."""
        return cast(BinaryIO, self.storage.open(self.address, "rb", cache_type="readahead"))

    def read(self, first: int, last: int) -> bytes:
        """Return the bytes from `first` up to `last`."""
        return bytes(self.storage.cat_file(self.address, start=first, end=last))

    def write(self, data: bytes) -> None:
        """Store bytes here, in one request where they are few: readers see all of them or none."""
        self.storage.pipe_file(self.address, data)


Place = Path | Address


def place_of(text: Path | str | Address) -> Place:
    """Return a path for a local path, and an `Address` for an address of object storage."""
    if isinstance(text, str) and SCHEME.match(text):
        return Path(text[len("file://") :]) if text.startswith("file://") else Address(text)
    return text if isinstance(text, Address) else Path(text)


@functools.cache
def storage_of(scheme: str) -> Any:
    """Return fsspec's file system for a scheme; raise if its package is not installed."""
    try:
        import fsspec

        return fsspec.filesystem(scheme, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ArgumentError(
            expected=f"a package that opens {scheme}:// addresses",
            received=str(error)[:200],
            remedy='pip install "isobit[s3]" for s3://, or the package of fsspec that serves this storage',
        ) from error
