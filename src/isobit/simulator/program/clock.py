"""Virtual time: `time.sleep` passes the baton, and `time.time`, `monotonic` and `perf_counter` show the rank's clock.

The clock of a rank is the schedule's plus one microsecond for each time it was read: a loop that waits for a time
ends, and prints the same for one seed. `subprocess` and `multiprocessing` keep the machine's time.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import called_by_program
from isobit.simulator.program import waits
from isobit.simulator.program.replaced import replaced

QUESTIONS = 1000  # after this many readings of the clock other strands run
READINGS = ("time", "monotonic", "perf_counter")
FOREIGN = (
    subprocess,
    *(m for n, m in sorted(sys.modules.items()) if n.startswith("multiprocessing.")),
)
# What programs poll files with; os.path and pathlib call these.
FILE_QUERIES = ("stat", "access", "listdir", "scandir")


def read_clock(rank: ranks.Rank) -> int:
    """Return the rank's time in microseconds since the start of the run; each reading adds one."""
    rank.questions += 1
    if rank.questions % QUESTIONS == 0 and called_by_program(sys._getframe(2)):
        advance_loop(rank)
        waits.poll("the time")
    return rank.skew + rank.clock + rank.questions


def advance_loop(rank: ranks.Rank) -> None:
    """Advance the clock of a loop that only reads the time, more with each round, up to 0.1 s at once."""
    calls, rounds = rank.time_loop
    rounds = rounds + 1 if calls == rank.calls else 0
    rank.time_loop = rank.calls, rounds
    rank.clock += min(rank.questions << min(rounds, 10), 100_000)
    rank.questions = 0


def seconds_of(plain: Callable[[], float]) -> Callable[[], float]:
    """Return a replacement for a clock of `time` that counts seconds."""
    start = plain()

    def seconds() -> float:
        return start + read_clock(ranks.current()) * 1e-6 if ranks.has_baton() else plain()

    return seconds


def nanoseconds_of(plain: Callable[[], int]) -> Callable[[], int]:
    """Return a replacement for a clock of `time` that counts nanoseconds."""
    start = plain()

    def nanoseconds() -> int:
        return start + read_clock(ranks.current()) * 1000 if ranks.has_baton() else plain()

    return nanoseconds


def sleep_of(plain: Callable[[float], None]) -> Callable[[float], None]:
    """Return a replacement for `time.sleep` that passes the baton."""

    def sleep(seconds: float) -> None:
        if not ranks.has_baton() or seconds < 0:  # Python raises for it
            plain(seconds)
        else:
            waits.sleep(seconds)

    return sleep


def query_of(plain: Any) -> Any:
    """Return a replacement for a file query that polls if a program repeats it for one path."""

    def query(path: Any = ".", *args: Any, **options: Any) -> Any:
        if ranks.has_baton() and isinstance(path, (str, bytes, os.PathLike)):
            waits.spin(os.fspath(path), f"the file {os.fspath(path)!r}")
        return plain(path, *args, **options)

    return query


@contextmanager
def polled_files() -> Iterator[None]:
    """Replace the file queries of `os`, also in its tables of functions that take certain options."""
    tables = (
        os.supports_fd,
        os.supports_dir_fd,
        os.supports_follow_symlinks,
        os.supports_effective_ids,
    )
    with ExitStack() as stack:
        for name in FILE_QUERIES:
            plain = getattr(os, name)
            query = query_of(plain)
            for table in tables:
                if plain in table:
                    table.add(query)
                    stack.callback(table.discard, query)
            stack.enter_context(replaced(os, name, query))
        yield


@contextmanager
def virtual_time() -> Iterator[None]:
    """Give ranks virtual time. Other threads, and modules for other processes, keep the machine's."""
    plain = SimpleNamespace(**vars(time))
    with ExitStack() as stack:
        for module in FOREIGN:
            if getattr(module, "time", None) is time:
                stack.enter_context(replaced(module, "time", plain))
        for name in READINGS:
            stack.enter_context(replaced(time, name, seconds_of(getattr(plain, name))))
            stack.enter_context(
                replaced(time, f"{name}_ns", nanoseconds_of(getattr(plain, f"{name}_ns")))
            )
        stack.enter_context(replaced(time, "sleep", sleep_of(plain.sleep)))
        stack.enter_context(replaced(threading, "_time", time.monotonic))  # deadlines of conditions
        stack.enter_context(replaced(queue, "time", time.monotonic))
        stack.enter_context(polled_files())
        yield
