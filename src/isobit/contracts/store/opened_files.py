"""Record which files code opens or imports while it is judged, besides the imports in its source.

[Note: What evidence depends on]
A contract's digest covers its text and the files that its code imports by statements (sources.py). Code may use more:
a module by `importlib`, a table or a configuration by `open`. An audit hook sees these while a claim is judged; each
file is hashed when it is first opened, and the hashes are part of the evidence. Reading evidence hashes the files
again: if one differs, the evidence no longer counts.

Not recorded, because a version or the digest covers it or because it is not an input: the interpreter and installed
packages, isobit itself, temporary files, caches, evidence, /proc, /sys and /dev, and files that the code writes. Not
detected: files that native code or child processes open, environment variables, the network. `--again` judges in any
case.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from blake3 import blake3

from isobit.contracts.store.sources import BY_NAME, ROOT

ABSENT = "absent"
CACHES = frozenset({"__pycache__", ".cache", ".triton", ".hypothesis", ".pytest_cache"})
INSTALLED = frozenset({"site-packages", "dist-packages"})
PSEUDO = ("/proc", "/sys", "/dev")
MANY = 100_000  # files that one finding may name

WRITTEN = "written"

_open: list[OpenedFiles] = []  # recorders that are recording now
# By source file, what was opened while one of its functions was running. A module may read a table once, for every
# contract that names it; only the first contract that is judged sees the event.
_opened_by: dict[str, dict[str, str]] = {}
_T = TypeVar("_T")


class OpenedFiles:
    """The files that one contract's code opens, with digests; paths below `base` are relative to it."""

    def __init__(self, base: Path, home: Path, known: Collection[Path]) -> None:
        self.base = os.path.abspath(base)
        self._left_out = (os.path.abspath(home), *PSEUDO, *_installed(self.base))
        self._temporary = os.path.abspath(tempfile.gettempdir())
        self._known = {os.path.abspath(path) for path in known}
        own = [
            p for p in known if p.suffix == ".py" and ROOT not in p.parents
        ]  # isobit imports no other code by name
        self._by_name = any(BY_NAME.search(path.read_bytes()) for path in own)
        self._found: dict[str, str] = {}

    def during(self, steps: Iterable[_T]) -> Iterator[_T]:
        """Record while each step is computed, not while the caller uses it."""
        _install()
        iterator = iter(steps)
        while True:
            with self._recording():
                step = next(iterator, _END)
            if step is _END:
                break
            yield step

    @contextmanager
    def _recording(self) -> Iterator[None]:
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)

    def files(self) -> tuple[tuple[str, str], ...]:
        """Return each path with its digest, sorted; call it when judging is done."""
        if self._by_name:  # modules loaded before can be used without an event
            for module in list(sys.modules.values()):
                origin = getattr(module, "__file__", None)
                if isinstance(origin, str) and os.path.isabs(origin):  # torch.ops has _ops.py
                    self.note(origin)
        found = dict(self._found)
        for source in self._known:
            for path, digest in list(_opened_by.get(source, {}).items()):
                if digest == WRITTEN or self._counts(path):
                    found[path] = WRITTEN if digest == WRITTEN else found.get(path, digest)
        inputs = (
            (_shown(path, self.base), digest) for path, digest in found.items() if digest != WRITTEN
        )
        return tuple(sorted(inputs))

    def note(self, path: str, written: bool = False) -> None:
        """Record that a file was opened."""
        path = os.path.abspath(path)
        if path.endswith(".pyc") and "__pycache__" in path:
            try:
                path = importlib.util.source_from_cache(path)
            except ValueError:
                return
        if not self._counts(path):
            return
        if written:
            self._found[path] = WRITTEN
        elif path not in self._found:
            self._found[path] = ABSENT  # first, so that hashing it is not recorded again
            self._found[path] = hash_file(path)
        for source in running_sources():
            _opened_by.setdefault(source, {})[path] = self._found[path]

    def _counts(self, path: str) -> bool:
        if (
            path in self._known
            or (CACHES | INSTALLED) & set(path.split(os.sep))
            or os.path.isdir(path)
        ):
            return False
        if any(_is_below(path, folder) for folder in self._left_out):
            return False
        return _is_below(path, self.base) or not _is_below(path, self._temporary)


_END: Any = object()


def running_sources() -> set[str]:
    """Return the files whose functions are running in this thread, except isobit's own."""
    found: set[str] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.add(frame.f_code.co_filename)
        frame = frame.f_back
    return {name for name in found if not _is_below(name, str(ROOT))}


def changed(files: Iterable[tuple[str, str]], base: Path, known: dict[str, str]) -> str:
    """Return the first file whose digest differs, or an empty text; `known` caches digests."""
    for name, digest in files:
        path = os.path.join(os.path.abspath(base), name)
        if path not in known:
            known[path] = hash_file(path)
        if known[path] != digest:
            return name
    return ""


def hash_file(path: str) -> str:
    """Return the BLAKE3 of a regular file; anything else is absent. Never blocks."""
    # Forged evidence may name a file without an end.
    if any(_is_below(os.path.realpath(path), folder) for folder in PSEUDO):
        return ABSENT
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ABSENT
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return ABSENT
        hasher = blake3()
        while block := file.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()


def _shown(path: str, base: str) -> str:
    """Return a path relative to the folder of the evidence, so that both can be copied together."""
    return os.path.relpath(path, base) if _is_below(path, base) else path


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _installed(base: str) -> tuple[str, ...]:
    """Return the folders of the interpreter, its packages and isobit, except parents of `base`."""
    places = {os.path.abspath(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix, str(ROOT))}
    return tuple(sorted(place for place in places if not _is_below(base, place)))


@lru_cache(maxsize=1)
def _install() -> None:
    """Install the audit hook, once per process: it cannot be removed."""
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _open:
        return
    if event == "open":
        path, _, flags = arguments
        written = bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
    elif event == "import":  # the file of an extension; other modules are opened as files too
        path, written = arguments[1], False
    elif event == "ctypes.dlopen":
        path, written = arguments[0], False
    else:
        return
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if isinstance(path, (str, os.PathLike)) and (event == "open" or os.sep in str(path)):
        for recorder in tuple(_open):
            recorder.note(str(path), written)
