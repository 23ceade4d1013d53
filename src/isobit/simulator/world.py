"""A world of simulated ranks: runs one function on each, and raises the root cause when it fails."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from multiprocessing import resource_tracker
from os import listdir as plain_listdir  # kept here: inside a world it is replaced
from typing import Any

import torch
import torch.distributed as dist

from isobit.errors import (
    ArgumentError,
    DeadlockError,
    IsobitError,
    RankLostError,
    SimulationError,
    UnsupportedError,
)
from isobit.simulator import faults
from isobit.simulator.checkers import collective_calls
from isobit.simulator.checkers.early_reads import watching_reads
from isobit.simulator.checkers.step_copies import Ledger
from isobit.simulator.checkers.training import Training
from isobit.simulator.checkers.verdict import Killed, Result, Stalled, diagnose, judge, origin
from isobit.simulator.checkers.wire import Watch
from isobit.simulator.collectives import Call
from isobit.simulator.faults import Fault
from isobit.simulator.network import Network
from isobit.simulator.program.folder import restore_folder
from isobit.simulator.program.threads import finish, has_library_threads
from isobit.simulator.program.variables import launcher_variables
from isobit.simulator.program.waits import LocalWait
from isobit.simulator.rank import (
    Rank,
    being,
    inside,
    restore_state,
    save_state,
    user_line,
    user_stack,
)
from isobit.simulator.rank import strand as current_strand
from isobit.simulator.schedule import Schedule, Waiting
from isobit.simulator.torch.install import installed
from isobit.simulator.torch.store import RankStore
from isobit.simulator.trace import Recorder, Trace

REFUSALS = 100  # calls that a rank may make after the world was stopped
GRACE = 2.0  # seconds in which a rank that is ended must reach Python
_running = threading.Lock()


class World:
    """Ranks on threads, of which one runs at a time."""

    ignore: Collection[str] = ()  # kinds of training that are meant, though they look wrong
    ledger: Ledger | None = None  # where training is noted, to be compared with one worker

    def __init__(
        self,
        ranks: int,
        seed: int = 0,
        faults: Sequence[Fault] = (),
        *,
        delays: bool = True,
        watch: Collection[str] = (),
        poison: bool = True,
        sends: str = "buffered",
        strict: bool = True,
        patience: float = 120.0,
    ) -> None:
        if (
            ranks < 1
            or sends not in ("buffered", "rendezvous")
            or any(not 0 <= f.rank < ranks for f in faults)
        ):
            raise ArgumentError(
                expected="at least one rank, sends 'buffered' or 'rendezvous', and faults of these ranks",
                received=f"{ranks} ranks, sends {sends!r}, faults {tuple(faults)}",
                remedy="count ranks from 0",
            )
        self.ranks, self.seed, self.faults, self.delays = ranks, seed, tuple(faults), delays
        self.watch_for, self.poison, self.sends, self.strict = tuple(watch), poison, sends, strict
        self.patience = patience

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        init: bool = True,
        recorded: Trace | None = None,
    ) -> Result:
        """Calls `function(rank, *args)` on every rank; with `init`, torch.distributed is initialised around it."""
        if inside() or not _running.acquire(blocking=False):
            raise UnsupportedError(
                expected="one world at a time in a process",
                received="a world started while another runs",
                remedy="wait for the first, or run the second in a process of its own",
            )
        try:
            self._prepare(recorded)
            with installed(self):
                threads = [
                    threading.Thread(
                        target=self._body,
                        args=(rank, function, args, init),
                        name=f"rank {rank.index}",
                        daemon=True,
                    )
                    for rank in self.members
                ]
                for thread in threads:
                    thread.start()
                try:
                    ended = self.schedule.run(self._watch_turn)
                except KeyboardInterrupt:
                    self._interrupt()
                    raise
                for thread in threads if ended else ():
                    thread.join()
            return judge(self)
        finally:
            _running.release()

    def _prepare(self, recorded: Trace | None) -> None:
        self.recorder = Recorder(
            Trace(self.ranks, self.seed, self.delays, self.faults, self.sends), recorded
        )
        self.schedule = Schedule(self.ranks, self.seed, self.delays, self.recorder)
        self.members = [
            Rank(self, index, launcher_variables(index, self.ranks)) for index in range(self.ranks)
        ]
        self.schedule.on_pass, self.schedule.on_take = self._pass, self._take
        self.schedule.on_stuck, self.schedule.patience = self._stuck, self.patience
        self.schedule.foreign = self._has_foreign
        self.skews = self.schedule.skew()
        self.findings: list[SimulationError] = []
        self.watch = Watch(self.watch_for, self.findings)
        self.watch.training = Training(self) if "training" in self.watch_for else None
        self.network, self.store = Network(self), RankStore(self)
        self.root: SimulationError | None = None
        self.lost: dict[int, str] = {}
        self.failed: list[int] = []  # ranks that raised an error of their own, in order
        self._verdicts: dict[int, BaseException] = {}
        self._planted = {(fault.rank, fault.call): fault for fault in reversed(self.faults)}
        self.votes: dict[tuple[str, int], dict[tuple[int, ...], dict[int, str]]] = {}

    def _interrupt(self) -> None:
        """Ranks leave at their next call; whoever presses twice need not wait for that."""
        self.root = RankLostError(
            expected="the run to end", received="an interrupt", remedy="start it again"
        )
        self.schedule.rest(self._watch_turn)

    def _watch_turn(self, strand: int, seconds: float) -> bool:
        """Called by the waiting thread: ends a run in which one turn takes for ever; False gives its threads up."""
        if seconds < self.patience:
            return True
        rank = self.members[self.schedule.owner[strand]]
        ident = rank.thread_ids.get(strand, 0)
        if seconds < self.patience + GRACE:
            if self.root is None:
                stack = user_stack(sys._current_frames().get(ident))
                self.root = collective_calls.endless_turn(rank.index, self.patience, stack)
                interrupt_thread(ident)
            return True
        return False

    def _has_foreign(self) -> bool:
        """Whether a thread that a library started, or another process, may still change something."""
        return has_library_threads() or has_children()

    def _pass(self, index: int) -> None:
        self.members[index].state = save_state()

    def _take(self, index: int) -> None:
        rank = self.members[index]
        restore_state(rank.state)
        restore_folder(rank)

    def _body(
        self, rank: Rank, function: Callable[..., Any], args: Sequence[Any], init: bool
    ) -> None:
        rank.thread_ids[rank.index] = threading.get_ident()
        vars(threading.current_thread())["_daemonic"] = (
            False  # which the threads of a program inherit
        )
        self.schedule.enter(rank.index)
        try:
            with (
                being(rank, rank.index),
                torch.autograd.set_multithreading_enabled(False),
                watching_reads(rank),
            ):
                self._call(rank, function, args, init)
            if rank.death is not None:  # a bare `except` of the program caught it
                raise Killed(str(rank.death))
        except BaseException as error:
            self._note_failure(rank, error)
        finally:  # whatever happened, the baton goes on
            rank.left = True
            self.recorder.note(rank.index, self.schedule.clocks[rank.index], "left")
            self.schedule.leave(rank.index)

    def _call(
        self, rank: Rank, function: Callable[..., Any], args: Sequence[Any], init: bool
    ) -> None:
        try:
            if init:
                dist.init_process_group(
                    "isobit", rank=rank.index, world_size=self.ranks, store=self.store
                )
            failed = True
            try:
                rank.value = function(rank.index, *args)
                failed = False
            except SystemExit as left:
                if left.code not in (None, 0):
                    raise
                failed = False
            finally:
                finish(rank, failed)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _note_failure(self, rank: Rank, error: BaseException) -> None:
        rank.error = rank.death or error
        told = origin(rank.error)
        consequence = isinstance(told, RankLostError) and rank.index not in told.ranks
        if not consequence and not (
            self.root is not None and isinstance(told, (type(self.root), Killed))
        ):
            self.failed.append(rank.index)

    def vote(self, rank: Rank, name: str, members: tuple[int, ...]) -> None:
        """Every rank, member or not, says of whom a new group is made; `checkers.dispute` hears them."""
        rank.incarnations[name] = rank.incarnations.get(name, -1) + 1
        votes = self.votes.setdefault((name, rank.incarnations[name]), {})
        votes.setdefault(members, {})[rank.index] = user_line(sys._getframe(1))

    def arrive(self, rank: Rank, call: Call, what: str) -> bool:
        """A rank makes a communication call: charges its clock and lets its faults happen; True if the call is lost."""
        self.check(rank)
        rank.calls += 1
        self.schedule.compute(rank.index)
        self.recorder.note(rank.index, self.schedule.clocks[rank.index], what)
        planted = self._planted.get((rank.index, rank.calls))
        if isinstance(planted, faults.PlantNaN):
            faults.plant_nan(call.inputs, planted.element)
        self.watch.depart(call, what)
        return planted is not None and self._happen(rank, planted, call, what)

    def _happen(self, rank: Rank, planted: Fault, call: Call, what: str) -> bool:
        self.recorder.note(rank.index, self.schedule.clocks[rank.index], f"fault {planted}")
        if isinstance(planted, faults.Die):
            rank.death = Killed(what)
            raise rank.death
        if isinstance(planted, faults.Stall):
            if planted.seconds is None:
                self.wait_for(rank, Stalled(), False)
            else:
                self.schedule.clocks[rank.index] += int(planted.seconds * 1e6)
        elif isinstance(planted, faults.Straggle):
            self.schedule.slowness[rank.index] = planted.factor
        elif isinstance(planted, faults.Flip) and call.inputs:
            if planted.to is None:
                call.sent = [
                    tensor.data.clone(memory_format=torch.contiguous_format)
                    for tensor in call.inputs
                ]
                faults.flip_bit(call.sent[0], planted.element, planted.bit)
            else:
                call.flipped_to = planted
        if isinstance(planted, faults.Drop):
            self.lost[rank.index] = f"what rank {rank.index} sent in {what} was dropped on its way"
            return True
        return False

    def wait_for(self, rank: Rank, waiting: Waiting, done: bool) -> None:
        if not done:
            self.check(rank)
            self.schedule.block(current_strand(), waiting)
        self.check(rank)

    def check(self, rank: Rank) -> None:
        """Raises what this rank was released with, or what stopped the world."""
        if rank.death is not None:  # a program's `finally` may still call
            raise Killed(str(rank.death))
        strand = current_strand()
        verdict = self._verdicts.pop(strand, None)
        if verdict is not None:
            raise verdict
        if strand in rank.started and rank.started[strand].cancelled:
            raise Killed("its rank ended")
        if self.root is not None:
            rank.refusals += 1
            if rank.refusals > REFUSALS:  # a program that tries again for ever
                raise Killed("refused again and again")
            raise self.again(self.root)

    def tell(self, finding: SimulationError) -> None:
        """Notes what is wrong; ends the run at every rank's next call, if the world is strict."""
        self.findings.append(finding)
        if self.strict and self.root is None:
            self.root = self.findings[0]

    @staticmethod
    def again(error: IsobitError) -> IsobitError:
        """The same error for another rank, with a traceback of its own."""
        if isinstance(error, SimulationError):
            kept = type(error)(
                expected=error.expected,
                received=error.received,
                remedy=error.remedy,
                ranks=error.ranks,
                stacks=error.stacks,
            )
            vars(kept).update(
                {k: v for k, v in vars(error).items() if k in ("waits", "cycle", "kind")}
            )
            return kept
        return type(error)(expected=error.expected, received=error.received, remedy=error.remedy)

    def _stuck(self) -> None:
        """No rank can run: finds the root, and releases every blocked rank with it."""
        strands, owner = dict(self.schedule.blocked), self.schedule.owner
        told = {
            owner[strand]: strand
            for strand in sorted(strands, key=lambda s: (by_network(strands[s]), -s))
        }
        blocked = {rank: strands[told[rank]] for rank in sorted(told)}
        frames = sys._current_frames()
        stacks = {
            i: user_stack(frames.get(self.members[i].thread_ids.get(told[i], 0))) for i in blocked
        }
        if self.root is None:
            try:
                self.root = diagnose(self, blocked, stacks)
            except (
                Exception
            ) as error:  # a flaw of a checker must not leave the ranks waiting for good
                self.root = DeadlockError(
                    expected="ranks that can go on",
                    received=f"none, and {error!r} on asking why",
                    remedy="report it",
                )
        for strand in sorted(strands):
            stalled = isinstance(strands[strand], Stalled)
            self._verdicts[strand] = Killed("stalled") if stalled else self.again(self.root)
            self.schedule.wake(strand)


def by_network(waiting: Waiting) -> bool:
    """Whether this is a wait for another rank's call, which says more than a join or a lock."""
    return not isinstance(waiting, LocalWait)


def has_children() -> bool:
    """Whether this process started others that may answer a rank; multiprocessing's resource tracker never does."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):
        return False
    found: set[str] = set()
    try:
        for thread in plain_listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as children:
                found.update(children.read().split())
    except OSError:  # a thread that has just ended, or a kernel that does not tell
        return True
    return bool(found - {str(getattr(resource_tracker._resource_tracker, "_pid", None))})


def interrupt_thread(ident: int) -> None:
    """Raises Killed in a thread as soon as it runs Python again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Killed))
