"""Locks that pass the baton: what `threading` makes on a rank, so that conditions, events and queues do as well."""

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
from isobit.simulator.program.clock import replaced
from isobit.simulator.schedule import Schedule


class InOrder(dict[Any, None]):
    """A set of threads that gives them in the order in which they came, not by address."""

    def add(self, thread: Any) -> None:
        self[thread] = None


class RankLock:
    """A plain lock that a strand waits for by passing the baton; threads without the baton wait for it as ever."""

    def __init__(self) -> None:
        self._plain = allocate_lock()
        self._waiters: list[tuple[Schedule, int, waits.LocalWait]] = []
        self._holder: int | None = None  # the rank that has it, if a rank has

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._take():
            return True
        if not ranks.has_baton():
            return self._plain.acquire(blocking, timeout)
        if not blocking:
            waits.spin(id(self), "a lock")
            return self._take()
        schedule, limit = ranks.current().world.schedule, None if timeout < 0 else timeout
        rank = ranks.current().index
        until = None if limit is None else schedule.clocks[rank] + int(limit * 1e6)
        while True:
            holder = rank if self._holder is None else self._holder
            waiting = waits.LocalWait("a lock of the program", [holder])
            entry = (schedule, ranks.strand(), waiting)
            self._waiters.append(entry)
            try:
                if self._take():  # a thread without the baton may have released it just now
                    return True
                left = None if until is None else max(0, until - schedule.clocks[rank]) * 1e-6
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
        return self._plain.locked()

    _is_owned = locked  # of a condition

    def _at_fork_reinit(self) -> None:
        self._plain, self._waiters = allocate_lock(), []

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


def lock_of(plain: Any) -> Any:
    def allocate() -> Any:
        return RankLock() if ranks.has_baton() else plain()

    return allocate


def reentrant_of(plain: Any) -> Any:
    python: Any = threading._PyRLock  # type: ignore[attr-defined]  # made of allocate_lock, as above

    def allocate(*args: Any) -> Any:
        return python() if ranks.has_baton() else plain(*args)

    return allocate


def simple_queue_of(plain: Any) -> Any:
    """What ThreadPoolExecutor's threads wait in: written in C, unless it is Python's own other form."""
    python: Any = queue._PySimpleQueue  # type: ignore[attr-defined]

    def make() -> Any:
        return python() if ranks.has_baton() else plain()

    return make


def pool_of(plain: Any) -> Any:
    """An executor joins its threads in the order of a set, which differs from run to run."""

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        if ranks.has_baton():
            self._threads = InOrder()

    return __init__


def question_of(plain: Any, what: str) -> Any:
    """A method that says whether something has happened; asked in a loop, it passes the baton."""

    def ask(self: Any) -> Any:
        if ranks.has_baton():
            waits.spin(id(self), what)
        return plain(self)

    return ask


@contextmanager
def cooperative_locks() -> Iterator[None]:
    """While it is open, locks that ranks make pass the baton."""
    allocate = lock_of(threading.Lock)
    with ExitStack() as stack:
        for owner, name, value in (
            (threading, "Lock", allocate),
            (threading, "_allocate_lock", allocate),
            (threading, "RLock", reentrant_of(threading.RLock)),
            (queue, "SimpleQueue", simple_queue_of(queue.SimpleQueue)),
            (threading.Event, "is_set", question_of(threading.Event.is_set, "an event")),
            (ThreadPoolExecutor, "__init__", pool_of(ThreadPoolExecutor.__init__)),
            (Future, "done", question_of(Future.done, "a future")),
            (queue.Queue, "empty", question_of(queue.Queue.empty, "a queue")),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
