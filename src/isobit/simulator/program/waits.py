"""Waits that pass the baton: for locks, threads, times, event loops and files."""

from __future__ import annotations

import functools
import os
import queue
import select
import selectors
import subprocess
import sys
import threading
import time
from _thread import allocate_lock
from asyncio import selector_events
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import called_by_program
from isobit.simulator.program.process_state import replaced
from isobit.simulator.schedule import Schedule, Waiting

# Waits inside a rank: for a lock, a thread, an event or a time, and loops that poll.

SPINS = 8  # after this many queries for one thing in one turn, the strand is polling


@dataclass(eq=False)
class LocalWait:
    """A wait inside one rank, or for a lock that a thread of another rank holds.

    Attributes:
        what: The wait in words.
        ranks: The ranks that can end it.
        outside: Whether a thread without the baton may end it.
    """

    what: str
    ranks: list[int] = field(default_factory=lambda: [ranks.current().index])
    outside: bool = True

    def describe(self) -> str:
        """Return the wait in words."""
        return self.what

    def missing(self) -> Iterable[int]:
        """Return the ranks that can end it."""
        return self.ranks


def wait(waiting: Waiting, seconds: float | None = None) -> bool:
    """Pass the baton on until the strand is woken (True) or its time is over (False)."""
    rank = ranks.current()
    rank.check()
    microseconds = None if seconds is None else int(seconds * 1e6)
    woken = rank.schedule.block(ranks.current_strand(), waiting, microseconds)
    rank.check()
    return woken


def wake(schedule: Schedule, strand: int, waiting: Waiting) -> None:
    """End the wait of a strand, from any thread."""

    def act() -> None:
        if schedule.blocked.get(strand) is waiting:
            schedule.wake(strand)

    if ranks.has_baton():
        act()
    else:
        schedule.outside(act)


def sleep(seconds: float) -> None:
    """Let virtual time pass."""
    rank = ranks.current()
    rank.check()
    if not rank.schedule.sleep(ranks.current_strand(), int(seconds * 1e6)):
        give_up(rank, "a loop of time.sleep")
    rank.check()


def poll(what: str) -> None:
    """Pass the baton on, in a loop that asks for `what` again and again."""
    rank = ranks.current()
    rank.check()
    schedule, strand = rank.schedule, ranks.current_strand()
    if not schedule.poll(strand) and not schedule.sleep(strand, 1):
        give_up(rank, f"a loop that asks for {what}")
    rank.check()


def spin(key: object, what: str) -> None:
    """Count the queries for one key in one turn; from the ninth on, each of them is a poll."""
    rank = ranks.current()
    now = rank.schedule.turn, rank.calls
    if rank.asked_in != now:
        # A rank that polled in its last turn and has made no call since is still polling.
        same_loop = rank.asked_in[1] == rank.calls
        rank.asked = {k: SPINS for k, n in rank.asked.items() if n > SPINS and same_loop}
        rank.asked_in = now
    rank.asked[key] = rank.asked.get(key, 0) + 1
    if rank.asked[key] > SPINS and called_by_program(sys._getframe(2)):
        poll(what)


def give_up(rank: ranks.Rank, what: str) -> None:
    """Block for good, since all runnable strands have polled in vain, so that the deadlock is reported."""
    waiting = LocalWait(f"{what}, for what no rank does", rank.others, outside=False)
    rank.schedule.block(ranks.current_strand(), waiting)


# Virtual time: `time.sleep` passes the baton, and `time.time`, `monotonic` and `perf_counter` show the rank's clock.
#
# The clock of a rank is the schedule's plus one microsecond for each time it was read: a loop that waits for a time
# ends, and prints the same for one seed. `subprocess` and `multiprocessing` keep the machine's time.

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
        poll("the time")
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

    def pause(seconds: float) -> None:
        if not ranks.has_baton() or seconds < 0:  # Python raises for it
            plain(seconds)
        else:
            sleep(seconds)

    return pause


def query_of(plain: Any) -> Any:
    """Return a replacement for a file query that polls if a program repeats it for one path."""

    def query(path: Any = ".", *args: Any, **options: Any) -> Any:
        if ranks.has_baton() and isinstance(path, (str, bytes, os.PathLike)):
            spin(os.fspath(path), f"the file {os.fspath(path)!r}")
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


# Event loops and `select`: a rank that waits for files or for a time passes the baton while nothing is ready.

SLICE = 0.001  # seconds between two checks of files that other processes may write to
Plain: Any = selectors.DefaultSelector


class RankSelector(Plain):  # type: ignore[misc]
    """The selector of asyncio's event loops."""

    _wait: tuple[Schedule, int, LocalWait] | None = None

    def select(self, timeout: float | None = None) -> Any:
        """Return the ready files; pass the baton until there are some, or until the time is over."""
        if not ranks.has_baton():
            return super().select(timeout)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            spin(id(self), "an event loop")
            return ready
        if len(self.get_map()) > 1:
            return self._check_files(timeout)
        # Only the pipe of the loop itself, to which threads write to wake it.
        rank, waiting = ranks.current(), LocalWait("an event loop")
        self._wait = rank.schedule, ranks.current_strand(), waiting
        ready = super().select(0)  # a thread without the baton may have written just now
        if not ready:
            wait(waiting, timeout)
        return ready or super().select(0)

    def _check_files(self, timeout: float | None) -> Any:
        """Check again and again in real time, since other processes may write."""
        rank = ranks.current()
        until = None if timeout is None else rank.clock + timeout * 1e6
        ready: Any = []
        while not ready and (until is None or rank.clock < until):
            sleep(SLICE)
            ready = super().select(SLICE)
        return ready

    def ring(self) -> None:
        """Wake the loop."""
        if self._wait is not None:
            schedule, strand, waiting = self._wait
            wake(schedule, strand, waiting)


def write_of(plain: Any) -> Any:
    """Return a replacement for asyncio's `_write_to_self` that also wakes the strand of the loop."""

    def write_to_self(self: Any) -> None:
        plain(self)
        if isinstance(self._selector, RankSelector):
            self._selector.ring()

    return write_to_self


def select_of(plain: Any) -> Any:
    """Return a replacement for `select.select` whose pure sleeps take virtual time."""

    def wait(reading: Any, writing: Any, special: Any, timeout: float | None = None) -> Any:
        if (
            ranks.has_baton()
            and timeout is not None
            and timeout > 0
            and not (reading or writing or special)
        ):
            sleep(timeout)
            return [], [], []
        return plain(reading, writing, special, timeout)

    return wait


@contextmanager
def cooperative_selection() -> Iterator[None]:
    """Make event loops of ranks pass the baton."""
    loop: Any = selector_events.BaseSelectorEventLoop
    with (
        replaced(selectors, "DefaultSelector", RankSelector),
        replaced(select, "select", select_of(select.select)),
        replaced(loop, "_write_to_self", write_of(loop._write_to_self)),
    ):
        yield


# Locks that pass the baton, so that conditions, events, queues and thread pools of a rank do as well.


class OrderedSet(dict[Any, None]):
    """A set that iterates in the order of insertion, not of addresses."""

    def add(self, thread: Any) -> None:
        """Add an element."""
        self[thread] = None


class RankLock:
    """A lock that strands wait for by passing the baton; threads without the baton wait as usual."""

    def __init__(self) -> None:
        """Make a lock that is free."""
        self._plain = allocate_lock()
        self._waiters: list[tuple[Schedule, int, LocalWait]] = []
        self._holder: int | None = None  # the rank that holds it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as `threading.Lock.acquire` does."""
        if self._take():
            return True
        if not ranks.has_baton():
            return self._plain.acquire(blocking, timeout)
        if not blocking:
            spin(id(self), "a lock")
            return self._take()
        rank = ranks.current()
        until = None if timeout < 0 else rank.clock + int(timeout * 1e6)
        while True:
            holder = rank.index if self._holder is None else self._holder
            waiting = LocalWait("a lock of the program", [holder])
            entry = (rank.schedule, ranks.current_strand(), waiting)
            self._waiters.append(entry)
            try:
                if self._take():  # a thread without the baton may have released it just now
                    return True
                left = None if until is None else max(0, until - rank.clock) * 1e-6
                woken = wait(waiting, left)
            finally:
                if entry in self._waiters:
                    self._waiters.remove(entry)
            if self._take():
                return True
            if not woken:
                return False

    def _take(self) -> bool:
        taken = self._plain.acquire(False)
        if taken:
            rank = ranks.owner()
            self._holder = None if rank is None else rank.index
        return taken

    def release(self) -> None:
        """Release the lock and wake the first strand that waits for it."""
        self._plain.release()
        if self._waiters:
            if ranks.has_baton():
                self._wake()
            else:
                self._waiters[0][0].outside(self._wake)

    def _wake(self) -> None:
        if self._waiters:
            schedule, strand, waiting = self._waiters.pop(0)
            if schedule.blocked.get(strand) is waiting:
                schedule.wake(strand)

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self._plain.locked()

    _is_owned = locked  # used by threading.Condition

    def _at_fork_reinit(self) -> None:
        self._plain, self._waiters = allocate_lock(), []

    def __enter__(self) -> bool:
        """Take the lock."""
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        """Release the lock."""
        self.release()


def lock_of(plain: Any) -> Any:
    """Return a replacement for `threading.Lock`."""

    def allocate() -> Any:
        return RankLock() if ranks.has_baton() else plain()

    return allocate


def reentrant_of(plain: Any) -> Any:
    """Return a replacement for `threading.RLock`: Python's own version, which is made of `threading.Lock`."""
    python: Any = threading._PyRLock  # type: ignore[attr-defined]

    def allocate(*args: Any) -> Any:
        return python() if ranks.has_baton() else plain(*args)

    return allocate


def simple_queue_of(plain: Any) -> Any:
    """Return a replacement for `queue.SimpleQueue`, which thread pools wait in: the version without C."""
    python: Any = queue._PySimpleQueue  # type: ignore[attr-defined]

    def make() -> Any:
        return python() if ranks.has_baton() else plain()

    return make


def pool_of(plain: Any) -> Any:
    """Return a replacement for `ThreadPoolExecutor.__init__`: its set of threads gets a fixed order."""

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if ranks.has_baton():
            self._threads = OrderedSet()

    return __init__


def polled(plain: Any, what: str) -> Any:
    """Return a replacement for a method such as `Event.is_set` that polls if it is called in a loop."""

    def ask(self: Any) -> Any:
        if ranks.has_baton():
            spin(id(self), what)
        return plain(self)

    return ask


@contextmanager
def cooperative_locks() -> Iterator[None]:
    """Make the locks of ranks pass the baton."""
    allocate = lock_of(threading.Lock)
    with ExitStack() as stack:
        for owner, name, value in (
            (threading, "Lock", allocate),
            (threading, "_allocate_lock", allocate),
            (threading, "RLock", reentrant_of(threading.RLock)),
            (queue, "SimpleQueue", simple_queue_of(queue.SimpleQueue)),
            (threading.Event, "is_set", polled(threading.Event.is_set, "an event")),
            (ThreadPoolExecutor, "__init__", pool_of(ThreadPoolExecutor.__init__)),
            (Future, "done", polled(Future.done, "a future")),
            (queue.Queue, "empty", polled(queue.Queue.empty, "a queue")),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
