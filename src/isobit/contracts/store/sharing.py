"""Evidence that machines share: a folder, or a prefix of object storage.

[Note: two writers]
A file of evidence is named by the digest of its contents (see [Note: Evidence files]), and is never changed. So two
writers of one name write the same bytes, and writers of different evidence write different names: nobody can overwrite
another's record, and no lock is needed. A torn write has contents that do not fit its name: readers refuse it, and the
next writer of that name puts it right. Object storage shows an object when all of it has arrived.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from blake3 import blake3

from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.addresses import Address, place_of

NAME = re.compile(r"[0-9a-f]{2}/([0-9a-f]{32}-[0-9a-f]{32}\.jsonl)(\.[\w.-]+)?")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between tries while storage does not answer
LARGEST = 64 << 20

T = TypeVar("T")


class Store:
    """Files of evidence below a folder or an address, by names such as `ab/DIGEST-LAST.jsonl`."""

    def __init__(self, url: str) -> None:
        """Use a folder or an address; nothing is read yet."""
        self.url, self.place = url, place_of(url)

    def names(self) -> set[str]:
        """Return the names of all files of evidence and their signatures."""
        place = self.place
        if isinstance(place, Address):
            root = place.storage._strip_protocol(place.address).rstrip("/") + "/"
            found = self._try(lambda: place.storage.find(place.address, refresh=True))
            names = {str(one)[len(root) :].lstrip("/") for one in found}
        else:
            names = {p.relative_to(place).as_posix() for p in place.glob("*/*") if p.is_file()}
        return {name for name in names if NAME.fullmatch(name)}

    def read(self, name: str) -> bytes:
        """Return the contents of a file."""
        place = self.place
        if isinstance(place, Address):
            storage, address = place.storage, f"{place.address}/{name}"
            return bytes(self._try(lambda: storage.cat_file(address)))
        return files.read_bytes(place / name, LARGEST)

    def write(self, name: str, data: bytes) -> None:
        """Store a file as a whole; the same name always has the same contents."""
        place = self.place
        if isinstance(place, Address):
            one = Address(f"{place.address}/{name}")
            self._try(lambda: one.write(data))
            return
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(place / name, data)

    def _try(self, call: Callable[[], T]) -> T:
        """Call again while storage does not answer."""
        last: Exception | None = None
        for wait in (*WAITS, None):
            try:
                return call()
            except FileNotFoundError:
                raise
            except (OSError, ConnectionError, TimeoutError) as error:
                last = error
            except Exception as error:  # of botocore and others, which have classes of their own
                if "onnect" not in f"{type(error).__name__} {error}":
                    raise
                last = error
            if wait is not None:
                time.sleep(wait)
        raise ArgumentError(
            expected=f"an answer from {self.url}",
            received=f"{type(last).__name__}: {str(last)[:200]}",
            remedy="run the command again when the storage answers: what was judged is kept in the local folder, and "
            "is put into the store then",
        ) from last


def is_whole(name: str, data: bytes) -> bool:
    """Return whether the contents of a file of evidence fit its name; of a signature, whether there are any."""
    if not name.endswith(".jsonl"):
        return bool(data.strip())
    last = data.removesuffix(b"\n").rsplit(b"\n", 1)[-1]
    return data.endswith(b"\n") and blake3(last).hexdigest()[:32] == name[-38:-6]


def pull(store: Store, folder: Path) -> int:
    """Take files that the folder does not have; torn ones are left. Returns how many were taken."""
    taken = 0
    for name in sorted(store.names()):
        if (folder / name).exists():
            continue
        data = store.read(name)
        if is_whole(name, data):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(folder / name, data)
            taken += 1
    return taken


def push(store: Store, folder: Path) -> int:
    """Put files that the store does not have, or has torn. Returns how many were put."""
    there = store.names()
    put = 0
    names = sorted(p.relative_to(folder).as_posix() for p in folder.glob("*/*"))
    for name in names:
        if not NAME.fullmatch(name):
            continue
        data = files.read_bytes(folder / name, LARGEST)
        if is_whole(name, data) and (name not in there or not is_whole(name, store.read(name))):
            store.write(name, data)
            put += 1
    return put
