"""Virtual time for programs: `time.sleep` passes the baton, and the functions of `time` show the rank's own clock.

The clock of a rank is the schedule's, which follows the seed, plus a microsecond for each question: a loop that waits
for a time gets there, and prints the same with one seed. Python's modules for other processes keep the machine's time.
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
from typing import TYPE_CHECKING, Any

from isobit.simulator import rank as ranks
from isobit.simulator.program import waits

if TYPE_CHECKING:
    from isobit.simulator.world import World

QUESTIONS = 1000  # so many for the time in a row, and others get their turn
READINGS = ("time", "monotonic", "perf_counter")
FOREIGN = (
    subprocess,
    *(m for n, m in sorted(sys.modules.items()) if n.startswith("multiprocessing.")),
)
LOOKS = (
    "stat",
    "access",
    "listdir",
    "scandir",
)  # what programs poll files with; os.path and pathlib go through them


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def ask(rank: ranks.Rank) -> int:
    """The rank's time in microseconds since the start of the run; one later with each question."""
    rank.questions += 1
    schedule = rank.world.schedule
    if rank.questions % QUESTIONS == 0 and waits.is_programs(sys._getframe(2)):
        charge_loop(rank)
        waits.poll("the time")
    return rank.world.skews[rank.index] + schedule.clocks[rank.index] + rank.questions


def charge_loop(rank: ranks.Rank) -> None:
    """Lets a loop that only asks for the time get on faster and faster, up to a tenth of a second at once."""
    calls, rounds = rank.time_loop
    rounds = rounds + 1 if calls == rank.calls else 0
    rank.time_loop = rank.calls, rounds
    rank.world.schedule.clocks[rank.index] += min(rank.questions << min(rounds, 10), 100_000)
    rank.questions = 0


def reading_of(plain: Callable[[], float]) -> Callable[[], float]:
    start = plain()

    def seconds() -> float:
        return start + ask(ranks.current()) * 1e-6 if ranks.has_baton() else plain()

    return seconds


def reading_ns_of(plain: Callable[[], int]) -> Callable[[], int]:
    start = plain()

    def nanoseconds() -> int:
        return start + ask(ranks.current()) * 1000 if ranks.has_baton() else plain()

    return nanoseconds


def sleep_of(plain: Callable[[float], None]) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        if not ranks.has_baton() or seconds < 0:  # of which Python complains
            plain(seconds)
        else:
            waits.sleep(seconds)

    return sleep


def look_of(plain: Any) -> Any:
    """A question to the file system: asked for one path again and again, it is a poll."""

    def look(path: Any = ".", *args: Any, **options: Any) -> Any:
        if ranks.has_baton() and isinstance(path, (str, bytes, os.PathLike)):
            waits.spin(os.fspath(path), f"the file {os.fspath(path)!r}")
        return plain(path, *args, **options)

    return look


@contextmanager
def looking() -> Iterator[None]:
    """The functions of `os`, and their places in its tables of what takes which option."""
    tables = (
        os.supports_fd,
        os.supports_dir_fd,
        os.supports_follow_symlinks,
        os.supports_effective_ids,
    )
    with ExitStack() as stack:
        for name in LOOKS:
            plain = getattr(os, name)
            look = look_of(plain)
            for table in tables:
                if plain in table:
                    table.add(look)
                    stack.callback(table.discard, look)
            stack.enter_context(replaced(os, name, look))
        yield


@contextmanager
def virtual_time(world: World) -> Iterator[None]:
    """While it is open, ranks have the world's time; other threads, and modules for processes, the machine's."""
    plain = SimpleNamespace(**vars(time))
    with ExitStack() as stack:
        for module in FOREIGN:
            if getattr(module, "time", None) is time:
                stack.enter_context(replaced(module, "time", plain))
        for name in READINGS:
            stack.enter_context(replaced(time, name, reading_of(getattr(plain, name))))
            stack.enter_context(
                replaced(time, f"{name}_ns", reading_ns_of(getattr(plain, f"{name}_ns")))
            )
        stack.enter_context(replaced(time, "sleep", sleep_of(plain.sleep)))
        stack.enter_context(replaced(threading, "_time", time.monotonic))  # deadlines of conditions
        stack.enter_context(replaced(queue, "time", time.monotonic))
        stack.enter_context(looking())
        yield
