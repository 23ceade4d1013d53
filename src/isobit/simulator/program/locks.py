"""Locks that pass the baton, so that conditions, events, queues and thread pools of a rank do as well."""

from __future__ import annotations

import functools
import queue
import threading
from _thread import allocate_lock
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program import waits
from isobit.simulator.program.replaced import replaced
from isobit.simulator.schedule import Schedule


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
        self._waiters: list[tuple[Schedule, int, waits.LocalWait]] = []
        self._holder: int | None = None  # the rank that holds it

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, as `threading.Lock.acquire` does."""
        if self._take():
            return True
        if not ranks.has_baton():
            return self._plain.acquire(blocking, timeout)
        if not blocking:
            waits.spin(id(self), "a lock")
            return self._take()
        rank = ranks.current()
        until = None if timeout < 0 else rank.clock + int(timeout * 1e6)
        while True:
            holder = rank.index if self._holder is None else self._holder
            waiting = waits.LocalWait("a lock of the program", [holder])
            entry = (rank.schedule, ranks.current_strand(), waiting)
            self._waiters.append(entry)
            try:
                if self._take():  # a thread without the baton may have released it just now
                    return True
                left = None if until is None else max(0, until - rank.clock) * 1e-6
                woken = waits.wait(waiting, left)
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


def query_of(plain: Any, what: str) -> Any:
    """Return a replacement for a method such as `Event.is_set` that polls if it is called in a loop."""

    def ask(self: Any) -> Any:
        if ranks.has_baton():
            waits.spin(id(self), what)
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
            (threading.Event, "is_set", query_of(threading.Event.is_set, "an event")),
            (ThreadPoolExecutor, "__init__", pool_of(ThreadPoolExecutor.__init__)),
            (Future, "done", query_of(Future.done, "a future")),
            (queue.Queue, "empty", query_of(queue.Queue.empty, "a queue")),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
