"""A script that every rank runs as `__main__`, with a module and standard streams of its own."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from blake3 import blake3

from isobit.errors import ArgumentError
from isobit.simulator import rank as ranks
from isobit.simulator.accelerator.modules import kind_in
from isobit.simulator.program.process_state import modules_of


class RankBytes(io.RawIOBase):
    """The `buffer` of a stream, for programs that write bytes."""

    def __init__(self, text: RankStream) -> None:
        """Write to the given stream."""
        self.text = text

    def write(self, data: Any) -> int:
        """Write bytes as text."""
        self.text.write(bytes(data).decode(errors="replace"))
        return len(data)

    def writable(self) -> bool:
        """Return True."""
        return True


class RankStream(io.TextIOBase):
    """Replaces a standard stream: keeps the text of each rank, and passes on that of other threads."""

    encoding = "utf-8"

    def __init__(self, plain: TextIO) -> None:
        """Replace the given stream."""
        self.plain = plain
        self.kept: dict[tuple[int, int], list[str]] = {}
        self.buffer = RankBytes(self)

    def write(self, text: str) -> int:
        """Keep or pass on a text."""
        if ranks.inside():
            rank = (
                ranks.current()
            )  # of this run, or of the run on one rank that it is compared with
            self.kept.setdefault((rank.world_size, rank.index), []).append(text)
            return len(text)
        return self.plain.write(text)

    def fileno(self) -> int:
        """Return the descriptor of the process, for faulthandler and the like."""
        return self.plain.fileno()

    def reconfigure(self, **settings: Any) -> None:
        """Do nothing: nothing is buffered or encoded here."""

    def flush(self) -> None:
        """Flush the stream of the process."""
        if not ranks.inside():
            self.plain.flush()

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False."""
        return False

    def text(self, rank: int, count: int) -> str:
        """Return everything that a rank of a world of `count` ranks wrote."""
        return "".join(self.kept.get((count, rank), ()))


class Script:
    """A script and its arguments.

    Attributes:
        accelerator: The kind of device that the script names, or nothing.
    """

    def __init__(self, path: Path, arguments: Sequence[str] = ()) -> None:
        """Compile the script."""
        self.path, self.arguments = path, list(arguments)
        self.code = read_code(path)
        self.accelerator = kind_in(path.read_bytes())
        self.output, self.errors = RankStream(sys.stdout), RankStream(sys.stderr)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the path to another process, which reads the file itself; see `read_again`."""
        digest = blake3(self.path.read_bytes()).hexdigest()
        return read_again, (str(self.path.resolve()), str(self.path), self.arguments, digest)

    @contextmanager
    def installed(self, capture: bool = False) -> Iterator[Callable[[int], dict[str, Any]]]:
        """Set `sys.argv` and `sys.path` for one run, with `capture` also the streams; yields `run`."""
        kept = sys.argv, sys.stdout, sys.stderr, list(sys.path)
        log = logging.root.level, list(logging.root.handlers)
        self.output, self.errors = RankStream(sys.stdout), RankStream(sys.stderr)
        sys.argv = [str(self.path), *self.arguments]
        if capture:
            sys.stdout, sys.stderr = self.output, self.errors
        sys.path.insert(0, str(self.path.parent.resolve()))
        try:
            with modules_of(str(self.path.parent.resolve())):
                yield self.run
        finally:
            sys.argv, sys.stdout, sys.stderr, sys.path[:] = kept
            logging.root.setLevel(log[0])  # else basicConfig does nothing in the next run
            logging.root.handlers[:] = log[1]

    def run(self, rank: int) -> dict[str, Any]:
        """Run the script on one rank and return its namespace."""
        module = ModuleType("__main__")
        module.__file__ = str(self.path)
        sys.modules["__main__"] = module  # of this rank, until it passes the baton
        exec(self.code, vars(module))
        return vars(module)


def read_again(whole: str, path: str, arguments: Sequence[str], digest: str) -> Script:
    """Read a script in another process or on another machine; raise if it is another script there."""
    here = Path(path) if Path(path).exists() else Path(whole)
    found = blake3(here.read_bytes()).hexdigest() if here.exists() else "no file"
    if found != digest:
        raise ArgumentError(
            expected=f"the same script at {whole} on every machine",
            received=f"{found[:16]} instead of {digest[:16]}",
            remedy="put the script into a folder that all machines share",
        )
    return Script(here, arguments)


def read_code(path: Path) -> CodeType:
    """Compile a script, so that stacks show its file and lines."""
    try:
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(
            expected="a Python script",
            received=f"{path} ({error})",
            remedy="name a file that python can run",
        ) from error
