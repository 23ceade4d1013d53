"""Runs a script as `__main__` on every rank of a world, each with a module and standard streams of its own."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from isobit.errors import ArgumentError
from isobit.simulator import rank as ranks


class BytesOfRank(io.RawIOBase):
    """A stream's `buffer`, for programs that write bytes."""

    def __init__(self, text: StreamOfRank) -> None:
        self.text = text

    def write(self, data: Any) -> int:
        self.text.write(bytes(data).decode(errors="replace"))
        return len(data)

    def writable(self) -> bool:
        return True


class StreamOfRank(io.TextIOBase):
    """Stands for a standard stream: keeps what each rank writes; from elsewhere it passes on."""

    encoding = "utf-8"

    def __init__(self, plain: TextIO) -> None:
        self.plain = plain
        self.kept: dict[tuple[int, int], list[str]] = {}
        self.buffer = BytesOfRank(self)

    def write(self, text: str) -> int:
        if ranks.inside():
            rank = ranks.current()  # of the world asked about, or of one worker beside it
            self.kept.setdefault((rank.world.ranks, rank.index), []).append(text)
            return len(text)
        return self.plain.write(text)

    def fileno(self) -> int:
        """Of the process, for faulthandler and the like: what is written there is not kept."""
        return self.plain.fileno()

    def reconfigure(self, **settings: Any) -> None:
        """Nothing is buffered here, and text is kept as text."""

    def flush(self) -> None:
        if not ranks.inside():
            self.plain.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def text(self, rank: int, count: int) -> str:
        """All that a rank of so many wrote."""
        return "".join(self.kept.get((count, rank), ()))


class Script:
    """A script and its arguments; `run` is what a world calls on each rank."""

    def __init__(self, path: Path, arguments: Sequence[str] = ()) -> None:
        self.path, self.arguments = path, list(arguments)
        self.code = read_code(path)
        self.output, self.errors = StreamOfRank(sys.stdout), StreamOfRank(sys.stderr)

    @contextmanager
    def installed(self, capture: bool = False) -> Iterator[Callable[[int], dict[str, Any]]]:
        """The process's arguments and search path, for one run of a world; with `capture`, streams too."""
        kept = sys.argv, sys.stdout, sys.stderr, list(sys.path)
        log = logging.root.level, list(logging.root.handlers)
        self.output, self.errors = StreamOfRank(sys.stdout), StreamOfRank(sys.stderr)
        sys.argv = [str(self.path), *self.arguments]
        if capture:
            sys.stdout, sys.stderr = self.output, self.errors
        sys.path.insert(0, str(self.path.parent.resolve()))
        try:
            yield self.run
        finally:
            sys.argv, sys.stdout, sys.stderr, sys.path[:] = kept
            logging.root.setLevel(log[0])  # basicConfig would do nothing in the next run
            logging.root.handlers[:] = log[1]

    def run(self, rank: int) -> dict[str, Any]:
        """One rank's run: the names that the script leaves."""
        module = ModuleType("__main__")
        module.__file__ = str(self.path)
        sys.modules["__main__"] = module  # this rank's, until the baton passes on
        exec(self.code, vars(module))  # the user named this file, to be run
        return vars(module)


def read_code(path: Path) -> CodeType:
    """Compiled, so that lines of the script have their numbers."""
    try:
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(
            expected="a Python script",
            received=f"{path} ({error})",
            remedy="name a file that python can run",
        ) from error
