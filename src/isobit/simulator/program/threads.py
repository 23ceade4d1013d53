"""Threads that a rank starts: they are strands of the rank, and run when they get the baton.

A thread that a library starts (a queue's feeder, a compiler's reader) may wait in C, where it cannot pass the baton:
it runs outside the schedule and cannot make communication calls.
"""

from __future__ import annotations

import asyncio.base_events
import concurrent.futures.thread
import functools
import queue
import sys
import threading
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from isobit.errors import SimulationError, in_one_line
from isobit.simulator import rank as ranks
from isobit.simulator.accelerator.tensors import serving_devices
from isobit.simulator.call_sites import (
    INSTALLED,
    PYTHON,
    SIMULATOR,
    TORCH,
    is_user_file,
    skip_pass_through,
    user_stack,
)
from isobit.simulator.checkers.deadlock import endless_lines
from isobit.simulator.checkers.pending_buffers import watching_reads
from isobit.simulator.findings import Killed
from isobit.simulator.program import waits
from isobit.simulator.program.process_state import replaced
from isobit.simulator.program.waits import OrderedSet
from isobit.simulator.rank import Rank, StartedThread

registry: Any = torch._C._distributed_c10d
DISTRIBUTED = f"{TORCH}/distributed"
POOL = concurrent.futures.thread.__file__
COOPERATIVE = (asyncio.base_events.__file__, threading.__file__)
# Threads that libraries started, in this run and in earlier ones.
SERVED: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class Strand(StartedThread):
    """A thread that a rank started, as a strand of the schedule."""

    def __init__(self, rank: Rank, thread: threading.Thread) -> None:
        """Add a strand for the thread to the schedule."""
        self.rank, self.thread = rank, thread
        self.number = rank.schedule.open(rank.index)
        self.ended = self.cancelled = False
        self.waiting: list[waits.LocalWait] = []
        rank.started[self.number] = self

    def run(self, body: Callable[[], None]) -> None:
        """Run the program's function on this thread whenever it has the baton."""
        rank, schedule = self.rank, self.rank.schedule
        rank.thread_ids[self.number] = threading.get_ident()
        schedule.enter(self.number)
        try:
            with (
                ranks.acting_as(rank, self.number),
                torch.autograd.set_multithreading_enabled(False),
            ):
                self._call(body)
        finally:
            self.ended = True
            del rank.started[self.number]
            rank.thread_ids.pop(self.number)
            for strand in schedule.strands[rank.index]:
                if schedule.blocked.get(strand) in self.waiting:
                    schedule.wake(strand)
            schedule.leave(self.number)

    def _call(self, body: Callable[[], None]) -> None:
        rank, findings = self.rank, self.rank.findings
        names = {} if rank.groups is None else dict(rank.groups.pg_names)
        for group, name in names.items():  # torch's registry is per thread
            registry._register_process_group(name, group)
        try:
            rank.check()
            with watching_reads(rank), serving_devices(rank):
                body()
        except (SystemExit, Killed):
            pass
        except SimulationError as error:
            if findings.root is None:  # else it is a consequence of that error
                findings.stop(error)
        except BaseException as error:  # the rank continues without the thread, as in Python
            raised = f"{type(error).__name__}: {in_one_line(error)}"
            text = f"thread {self.thread.name!r} of rank {rank.index} raised {raised}"
            findings.lost.setdefault(rank.index, text)
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, self.thread))
            )
        finally:
            for name in names.values():
                registry._unregister_process_group(name)

    def join(self, seconds: float | None) -> None:
        """Wait for the end of the thread."""
        if self.ended:
            return
        waiting = waits.LocalWait(f"join of thread {self.thread.name!r}", outside=False)
        self.waiting.append(waiting)
        waits.wait(waiting, seconds)

    def cancel(self) -> None:
        """End the thread at its next wait."""
        schedule = self.rank.schedule
        self.cancelled = True
        if self.number in schedule.blocked:
            schedule.wake(self.number)
        while not self.ended:
            waiting = waits.LocalWait(f"the end of thread {self.thread.name!r}", outside=False)
            self.waiting.append(waiting)
            schedule.block(ranks.current_strand(), waiting)


def belongs_to_program(thread: threading.Thread) -> bool:
    """Return whether a thread runs a function of the program, or serves one of its thread pools."""
    target: Any = getattr(thread, "_target", None) or type(thread).run
    while isinstance(target, functools.partial):
        target = target.func
    target = getattr(target, "__wrapped__", target)
    call = getattr(target, "__call__", None)  # noqa: B004
    code = getattr(target, "__code__", None) or getattr(call, "__code__", None)
    path = code.co_filename if code is not None else ""
    if path == POOL:
        return started_by_program(sys._getframe(2))
    if path in COOPERATIVE or path.startswith((SIMULATOR, DISTRIBUTED)):
        return True
    return bool(path) and not path.startswith((INSTALLED, PYTHON, "<frozen"))


def started_by_program(frame: FrameType | None) -> bool:
    """Return whether a pool is the program's or torch.distributed's.

    The pool of another library, and its locks, exist longer than the rank.
    """
    frame = skip_pass_through(frame)
    path = "" if frame is None else frame.f_code.co_filename
    return path.startswith(DISTRIBUTED) or not path.startswith(INSTALLED)


def start_of(plain: Any) -> Any:
    """Return a replacement for `Thread.start` that makes the thread a strand of the rank."""

    def start(self: threading.Thread) -> None:
        if not ranks.has_baton() or self._started.is_set():  # type: ignore[attr-defined]
            plain(self)
            return
        rank, body = ranks.current(), self.run
        self._started = Started()  # type: ignore[attr-defined]
        if belongs_to_program(self):
            strand = Strand(rank, self)
            vars(self).update(isobit_strand=strand, run=lambda: strand.run(body))
        else:
            SERVED.add(self)
            vars(self).update(run=lambda: serve(rank, body))
        daemon, self._daemonic = self.daemon, True  # type: ignore[attr-defined]  # the process may exit
        plain(self)
        self._daemonic = daemon  # type: ignore[attr-defined]

    return start


def serve(rank: Rank, body: Callable[[], None]) -> None:
    """Run the thread of a library, outside the schedule."""
    with ranks.serving(rank):
        body()


class Started:
    """The event that a thread sets when it starts; waiting for it does not pass the baton."""

    def __init__(self) -> None:
        """Make an event that is not set."""
        self._gate, self._set = allocate_lock(), False
        self._gate.acquire()

    def set(self) -> None:
        """Set the event."""
        self._set = True
        self._gate.release()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event."""
        with self._gate:
            return True

    def _at_fork_reinit(self) -> None:
        self._gate = allocate_lock()


def join_of(plain: Any) -> Any:
    """Return a replacement for `Thread.join` that passes the baton."""

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        strand = vars(self).get("isobit_strand")
        if strand is not None and ranks.has_baton() and self is not threading.current_thread():
            strand.join(timeout)
            if not strand.ended:
                return
            timeout = None
        plain(self, timeout)

    return join


def is_alive_of(plain: Any, join: Any) -> Any:
    """Return a replacement for `Thread.is_alive` that polls if it is called in a loop."""

    def is_alive(self: threading.Thread) -> bool:
        strand = vars(self).get("isobit_strand")
        if strand is not None and ranks.has_baton():
            waits.spin(id(self), f"thread {self.name!r}")
            if not strand.ended:
                return True
            join(self)  # it has left the schedule and is about to end
        return bool(plain(self))

    return is_alive


def finish(rank: Rank, failed: bool) -> None:
    """Wait for the threads of a rank whose function has ended, as a process does, and end its daemons."""
    started = list(rank.started.values())
    pools = {id(pool): pool for strand in started if (pool := pool_of(strand.thread)) is not None}
    open_pools = [pool for pool in pools.values() if not pool._shutdown]
    try:
        for pool in open_pools:  # as at the exit of Python: submitted work is still done
            pool._shutdown = True
            pool._work_queue.put(None)
        for strand in started:
            if not failed and not strand.thread.daemon:
                strand.join(None)
    finally:
        for strand in list(rank.started.values()):
            strand.cancel()
        for pool in open_pools:  # a module may keep it for the next run
            pool._shutdown, pool._threads = False, OrderedSet()
            pool._work_queue = queue.SimpleQueue()
            pool._idle_semaphore = threading.Semaphore(0)


def pool_of(thread: threading.Thread) -> Any:
    """Return the ThreadPoolExecutor of a thread, or None."""
    worker: Any = concurrent.futures.thread._worker
    if getattr(thread, "_target", None) is not worker:
        return None
    return thread._args[0]()  # type: ignore[attr-defined]


def has_library_threads() -> bool:
    """Return whether a thread without the baton is alive that may wake a rank."""
    return any(thread.is_alive() for thread in SERVED) or any(
        (pool := pool_of(thread)) is not None
        and "isobit_strand" not in vars(thread)
        and not waits_for_work(thread, pool)
        for thread in threading.enumerate()
    )


def waits_for_work(thread: threading.Thread, pool: Any) -> bool:
    """Return whether a pool's thread has nothing to do, as those that torch.compile leaves behind."""
    frame = sys._current_frames().get(thread.ident or 0)
    worker: Any = concurrent.futures.thread._worker
    return pool._work_queue.empty() and frame is not None and frame.f_code is worker.__code__


@contextmanager
def threads_of_ranks() -> Iterator[None]:
    """Make the threads that ranks start strands of the schedule."""
    plain_join = threading.Thread.join
    with ExitStack() as stack:
        for name, value in (
            ("start", start_of(threading.Thread.start)),
            ("join", join_of(plain_join)),
            ("is_alive", is_alive_of(threading.Thread.is_alive, plain_join)),
        ):
            stack.enter_context(replaced(threading.Thread, name, value))
        yield


# A budget of lines: a rank that runs more lines of its own code in one turn than allowed is
# reported.
#
# Unlike patience, which is real time, the budget does not depend on the machine. It counts lines of
# the program, not of installed libraries, and costs about a microsecond for each, so that it is off
# unless it is asked for.


@contextmanager
def counting_lines(rank: Rank, budget: int | None) -> Iterator[None]:
    """Count the lines of the current thread; end it with a finding when one turn has more than `budget`."""
    if budget is None:
        yield
        return
    limit, turn, count = budget, -1, 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal turn, count
        if event == "line":
            if turn != rank.schedule.turn:
                turn, count = rank.schedule.turn, 0
            count += 1
            if count > limit and rank.findings.root is None:
                rank.findings.root = endless_lines(rank.index, limit, user_stack(frame))
                raise Killed("it ran too many lines")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        return on_line if is_user_file(path) and not path.startswith(INSTALLED) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
