"""Execution of a run: one thread per rank, the watchdog, and what happens when no rank can continue."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from os import listdir as real_listdir  # saved: it is replaced during a run
from typing import Any

import torch
import torch.distributed as dist

from isobit.errors import DeadlockError, RankLostError, UnsupportedError
from isobit.simulator.accelerator.tensors import forget_devices, serving_devices
from isobit.simulator.call_sites import user_stack
from isobit.simulator.checkers.deadlock import endless_turn
from isobit.simulator.checkers.pending_buffers import watching_reads
from isobit.simulator.checkers.step_record import StepCopies
from isobit.simulator.faults import Stalled
from isobit.simulator.findings import Killed, copy_error
from isobit.simulator.program.environment import restore_folder
from isobit.simulator.program.process_state import restore_state, save_state
from isobit.simulator.program.threads import counting_lines, finish, has_library_threads
from isobit.simulator.program.waits import LocalWait
from isobit.simulator.rank import Rank, acting_as, inside
from isobit.simulator.result import Result, conclude, diagnose, find_origin
from isobit.simulator.run import Run, Settings
from isobit.simulator.schedule import Trace, Waiting
from isobit.simulator.torch.install import installed

GRACE = 2.0  # seconds in which a thread that is ended must reach Python code
_running = threading.Lock()


def execute(
    settings: Settings,
    function: Callable[..., Any],
    args: Sequence[Any],
    init: bool,
    recorded: Trace | None = None,
    copies: StepCopies | None = None,
) -> Result:
    """Call `function(rank, *args)` on every rank of a new run; see `World.run`."""
    if inside() or not _running.acquire(blocking=False):
        raise UnsupportedError(
            expected="one simulated run at a time in a process",
            received="a run started while another one is in progress",
            remedy="start the second one after the first, or in another process",
        )
    try:
        run = Run(settings, recorded, copies)
        with installed(run):
            joined = Execution(run, function, args, init).run_ranks()
        for thread in joined:  # here time and files are the system's own again
            wait_for_exit(thread)
        if run.flight_recorder is not None and settings.flight_recorder is not None:
            run.flight_recorder.write(settings.flight_recorder)
        return conclude(run)
    finally:
        _running.release()


class Execution:
    """The threads of a run."""

    def __init__(
        self, run: Run, function: Callable[..., Any], args: Sequence[Any], init: bool
    ) -> None:
        """Connect the schedule of the run with these threads."""
        self.run, self.function, self.args, self.init = run, function, args, init
        schedule = run.schedule
        schedule.on_pass, schedule.on_take = self._save, self._restore
        schedule.on_stuck, schedule.patience = self._on_stuck, run.settings.patience
        schedule.foreign = lambda: has_library_threads() or has_children()

    def run_ranks(self) -> list[threading.Thread]:
        """Start a thread per rank and wait for their end, or until one has to be given up.

        Returns:
            The threads that were joined: all or, if one was given up, none.
        """
        threads = [
            threading.Thread(
                target=self._run_rank, args=(rank,), name=f"rank {rank.index}", daemon=True
            )
            for rank in self.run.ranks
        ]
        for thread in threads:
            thread.start()
        try:
            ended = self.run.schedule.run(self._watch_turn)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        for thread in threads if ended else ():
            thread.join()
        return threads if ended else []

    def _interrupt(self) -> None:
        """End every rank at its next call; a second interrupt ends this wait."""
        self.run.findings.root = RankLostError(
            expected="the run to end", received="an interrupt", remedy="start it again"
        )
        self.run.schedule.rest(self._watch_turn)

    def _watch_turn(self, strand: int, seconds: float) -> bool:
        """End a run in which one turn takes too long; False if its thread does not react."""
        patience, findings = self.run.settings.patience, self.run.findings
        if seconds < patience:
            return True
        rank = self.run.ranks[self.run.schedule.owner[strand]]
        ident = rank.thread_ids.get(strand, 0)
        if seconds < patience + GRACE:
            if findings.root is None:
                stack = user_stack(sys._current_frames().get(ident))
                findings.root = endless_turn(rank.index, patience, stack)
                interrupt_thread(ident)
            return True
        return False

    def _save(self, index: int) -> None:
        self.run.ranks[index].state = save_state()

    def _restore(self, index: int) -> None:
        rank = self.run.ranks[index]
        restore_state(rank.state)
        restore_folder(rank)
        if rank.accelerator:
            forget_devices()

    def _run_rank(self, rank: Rank) -> None:
        rank.thread_ids[rank.index] = threading.get_ident()
        # Threads of the program inherit this: they are no daemons.
        vars(threading.current_thread())["_daemonic"] = False
        self.run.schedule.enter(rank.index)
        try:
            with (
                acting_as(rank, rank.index),
                torch.autograd.set_multithreading_enabled(False),
                watching_reads(rank),
                serving_devices(rank),
                counting_lines(rank, self.run.settings.lines),
            ):
                self._call(rank)
            if rank.death is not None:  # a bare `except` of the program caught it
                raise Killed(str(rank.death))
        except BaseException as error:
            self._note_failure(rank, error)
        finally:  # the baton is passed on whatever happened
            rank.left = True
            self.run.recorder.note(rank.index, rank.clock, "left")
            self.run.schedule.leave(rank.index)

    def _call(self, rank: Rank) -> None:
        try:
            if self.init:
                dist.init_process_group(
                    "isobit", rank=rank.index, world_size=rank.world_size, store=self.run.store
                )
            failed = True
            try:
                rank.value = self.function(rank.index, *self.args)
                failed = False
            except SystemExit as stop:
                if stop.code not in (None, 0):
                    raise
                failed = False
            finally:
                finish(rank, failed)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _note_failure(self, rank: Rank, error: BaseException) -> None:
        """Note a rank that failed by itself, not because of another rank or because the run was stopped."""
        rank.error = rank.death or error
        origin, root = find_origin(rank.error), self.run.findings.root
        if isinstance(origin, RankLostError) and rank.index not in origin.ranks:
            return
        if root is None or not isinstance(origin, (type(root), Killed)):
            self.run.findings.failed.append(rank.index)

    def _on_stuck(self) -> None:
        """Find the root cause when no strand is runnable, and wake every blocked strand with it."""
        run, schedule, findings = self.run, self.run.schedule, self.run.findings
        strands, owner = dict(schedule.blocked), schedule.owner
        # Of each rank one strand is shown: one that waits for another rank, if there is one.
        shown = {
            owner[strand]: strand
            for strand in sorted(strands, key=lambda s: (waits_for_rank(strands[s]), -s))
        }
        blocked = {rank: strands[shown[rank]] for rank in sorted(shown)}
        frames = sys._current_frames()
        stacks = {
            i: user_stack(frames.get(run.ranks[i].thread_ids.get(shown[i], 0))) for i in blocked
        }
        if findings.root is None:
            try:
                findings.root = diagnose(run, blocked, stacks)
            except Exception as error:  # an error of a checker must not leave ranks blocked
                findings.root = DeadlockError(
                    expected="ranks that can continue",
                    received=f"none, and {error!r} while looking for the cause",
                    remedy="report this as a bug of isobit.simulator, with the program",
                )
        for strand in sorted(strands):
            stalled = isinstance(strands[strand], Stalled)
            released = Killed("stalled") if stalled else copy_error(findings.root)
            run.ranks[owner[strand]].released[strand] = released
            schedule.wake(strand)


def wait_for_exit(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread that was joined.

    `join` returns before the thread drops what torch keeps for it, such as the mode of `torch.set_default_device`. For
    that it takes the interpreter's lock; if Python is exiting by then, the process aborts.
    """
    deadline = time.monotonic() + GRACE
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < deadline:
        time.sleep(0.001)


def waits_for_rank(waiting: Waiting) -> bool:
    """Return whether a wait is for a call of another rank, rather than for a thread or a lock."""
    return not isinstance(waiting, LocalWait)


def has_children() -> bool:
    """Return whether this process has child processes that a rank may wait for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return False
    found: set[str] = set()
    try:
        for thread in real_listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as children:
                found.update(children.read().split())
    except OSError:  # a thread that has just ended, or a kernel without this file
        return True
    return bool(found - {str(pid) for pid in servants()})


def servants() -> set[int | None]:
    """Return the processes that only serve this one: multiprocessing's resource tracker and torch's compilers."""
    compilers = getattr(sys.modules.get("torch._inductor.async_compile"), "_pool_set", ())
    return {getattr(resource_tracker._resource_tracker, "_pid", None)} | {
        getattr(getattr(pool, "process", None), "pid", None) for pool in compilers
    }


def interrupt_thread(ident: int) -> None:
    """Raise Killed in a thread as soon as it runs Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Killed))
