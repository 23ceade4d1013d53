"""Threads that a rank starts: they belong to the rank, and run when the baton comes to them.

A thread that a library starts (a queue's feeder, a compiler's reader) may wait in C, where no baton can be passed: it
runs beside the schedule and cannot make communication calls.
"""

from __future__ import annotations

import asyncio.base_events
import concurrent.futures.thread
import functools
import os
import queue
import sys
import threading
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from isobit.errors import SimulationError, in_one_line
from isobit.simulator import rank as ranks
from isobit.simulator.checkers.early_reads import watching_reads
from isobit.simulator.checkers.verdict import Killed
from isobit.simulator.program import waits
from isobit.simulator.program.clock import replaced
from isobit.simulator.program.locks import InOrder
from isobit.simulator.rank import INSTALLED, PYTHON, Rank

if TYPE_CHECKING:
    from isobit.simulator.world import World

registry: Any = torch._C._distributed_c10d
OURS = os.path.dirname(
    os.path.dirname(__file__)
)  # what a program calls by another name, as time.sleep
DISTRIBUTED = os.path.join(os.path.dirname(torch.__file__), "distributed")
POOL = concurrent.futures.thread.__file__
COOPERATIVE = (asyncio.base_events.__file__, threading.__file__)
SERVED: weakref.WeakSet[threading.Thread] = (
    weakref.WeakSet()
)  # libraries' threads, of this world and of earlier ones


class Strand:
    """A thread that a rank started, as the schedule knows it."""

    def __init__(self, rank: Rank, thread: threading.Thread) -> None:
        self.rank, self.thread = rank, thread
        self.number = rank.world.schedule.open(rank.index)
        self.ended = self.cancelled = False
        self.waiting: list[waits.LocalWait] = []
        rank.started[self.number] = self

    def run(self, body: Callable[[], None]) -> None:
        """What the thread runs: the program's function, while it has the baton."""
        world, rank = self.rank.world, self.rank
        rank.thread_ids[self.number] = threading.get_ident()
        world.schedule.enter(self.number)
        try:
            with ranks.being(rank, self.number), torch.autograd.set_multithreading_enabled(False):
                self._call(body)
        finally:
            self.ended = True
            del rank.started[self.number]
            rank.thread_ids.pop(self.number)
            for strand in world.schedule.strands[rank.index]:
                if world.schedule.blocked.get(strand) in self.waiting:
                    world.schedule.wake(strand)
            world.schedule.leave(self.number)

    def _call(self, body: Callable[[], None]) -> None:
        names = {} if self.rank.groups is None else dict(self.rank.groups.pg_names)
        for group, name in names.items():  # torch's registry is per thread
            registry._register_process_group(name, group)
        try:
            self.rank.world.check(self.rank)
            with watching_reads(self.rank):
                body()
        except (SystemExit, Killed):
            pass
        except SimulationError as error:
            if self.rank.world.root is None:  # nobody else would hear of it
                self.rank.world.tell(error)
        except BaseException as error:  # as Python does, which goes on without the thread
            raised = f"{type(error).__name__}: {in_one_line(error)}"
            said = f"thread {self.thread.name!r} of rank {self.rank.index} raised {raised}"
            self.rank.world.lost.setdefault(self.rank.index, said)
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, self.thread))
            )
        finally:
            for name in names.values():
                registry._unregister_process_group(name)

    def join(self, seconds: float | None) -> None:
        """Waits for the end of the thread."""
        if self.ended:
            return
        waiting = waits.LocalWait(f"join of thread {self.thread.name!r}", outside=False)
        self.waiting.append(waiting)
        waits.wait(waiting, seconds)

    def cancel(self) -> None:
        """Ends the thread at its next wait."""
        schedule = self.rank.world.schedule
        self.cancelled = True
        if self.number in schedule.blocked:
            schedule.wake(self.number)
        while not self.ended:
            waiting = waits.LocalWait(f"the end of thread {self.thread.name!r}", outside=False)
            self.waiting.append(waiting)
            schedule.block(ranks.strand(), waiting)


def is_programs(thread: threading.Thread) -> bool:
    """Whether the program wrote what the thread runs, or it serves a ThreadPoolExecutor."""
    target: Any = getattr(thread, "_target", None) or type(thread).run
    while isinstance(target, functools.partial):
        target = target.func
    target = getattr(target, "__wrapped__", target)
    call = getattr(target, "__call__", None)  # noqa: B004
    code = getattr(target, "__code__", None) or getattr(call, "__code__", None)
    path = code.co_filename if code is not None else ""
    if path == POOL:
        return started_by_program(sys._getframe(2))
    if path in COOPERATIVE or path.startswith((OURS, DISTRIBUTED)):
        return True
    return bool(path) and not path.startswith((INSTALLED, PYTHON, "<frozen"))


def started_by_program(frame: FrameType | None) -> bool:
    """Whether a pool is the program's or torch.distributed's; a library's outlives the rank, as do its locks."""
    while frame is not None and waits.is_passing(frame.f_code.co_filename):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    return path.startswith(DISTRIBUTED) or not path.startswith(INSTALLED)


def start_of(plain: Any) -> Any:
    def start(self: threading.Thread) -> None:
        if not ranks.has_baton() or self._started.is_set():  # type: ignore[attr-defined]
            plain(self)
            return
        rank, body = ranks.current(), self.run
        self._started = Started()  # type: ignore[attr-defined]
        if is_programs(self):
            strand = Strand(rank, self)
            vars(self).update(isobit_strand=strand, run=lambda: strand.run(body))
        else:
            SERVED.add(self)
            vars(self).update(run=lambda: serve(rank, body))
        asked, self._daemonic = self.daemon, True  # type: ignore[attr-defined]  # no thread keeps the process from its end
        plain(self)
        self._daemonic = asked  # type: ignore[attr-defined]

    return start


def serve(rank: Rank, body: Callable[[], None]) -> None:
    with ranks.serving(rank):
        body()


class Started:
    """The event that a thread sets as it starts; nobody passes the baton while waiting for it."""

    def __init__(self) -> None:
        self._gate, self._set = allocate_lock(), False
        self._gate.acquire()

    def set(self) -> None:
        self._set = True
        self._gate.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        with self._gate:
            return True

    def _at_fork_reinit(self) -> None:
        self._gate = allocate_lock()


def join_of(plain: Any) -> Any:
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
    def is_alive(self: threading.Thread) -> bool:
        strand = vars(self).get("isobit_strand")
        if strand is not None and ranks.has_baton():
            waits.spin(id(self), f"thread {self.name!r}")
            if not strand.ended:
                return True
            join(self)  # it has left the schedule, and is about to end
        return bool(plain(self))

    return is_alive


def finish(rank: Rank, failed: bool) -> None:
    """At the end of a rank's function: waits for its threads as a process does, and ends its daemons."""
    started = list(rank.started.values())
    pools = {id(pool): pool for strand in started if (pool := pool_of(strand.thread)) is not None}
    open_pools = [pool for pool in pools.values() if not pool._shutdown]
    try:
        for pool in open_pools:  # as Python does at its exit: what was submitted is still done
            pool._shutdown = True
            pool._work_queue.put(None)
        for strand in started:
            if not failed and not strand.thread.daemon:
                strand.join(None)
    finally:
        for strand in list(rank.started.values()):
            strand.cancel()
        for pool in open_pools:  # a module may keep it for the next run
            pool._shutdown, pool._threads, pool._work_queue = False, InOrder(), queue.SimpleQueue()
            pool._idle_semaphore = threading.Semaphore(0)


def pool_of(thread: threading.Thread) -> Any:
    """The ThreadPoolExecutor that a thread works for, if it does."""
    worker: Any = concurrent.futures.thread._worker
    if getattr(thread, "_target", None) is not worker:
        return None
    return thread._args[0]()  # type: ignore[attr-defined]


def has_library_threads() -> bool:
    """Whether a thread without the baton is alive that may answer a rank."""
    return any(thread.is_alive() for thread in SERVED) or any(
        pool_of(thread) is not None and "isobit_strand" not in vars(thread)
        for thread in threading.enumerate()
    )


@contextmanager
def threads_of_ranks(world: World) -> Iterator[None]:
    """While it is open, threads that ranks start are strands of the world."""
    plain_join = threading.Thread.join
    with ExitStack() as stack:
        for name, value in (
            ("start", start_of(threading.Thread.start)),
            ("join", join_of(plain_join)),
            ("is_alive", is_alive_of(threading.Thread.is_alive, plain_join)),
        ):
            stack.enter_context(replaced(threading.Thread, name, value))
        yield
