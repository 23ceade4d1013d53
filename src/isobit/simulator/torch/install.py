"""Put a run under torch.distributed and the standard library while it lasts, and undo all of it afterwards."""

from __future__ import annotations

import ctypes
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.rpc as rpc
import torch.multiprocessing

from isobit.errors import MismatchError, UnsupportedError
from isobit.simulator import rank as ranks
from isobit.simulator.accelerator.functions import served_functions
from isobit.simulator.checkers.pending_buffers import watched_functions
from isobit.simulator.program.environment import folder_per_rank, variables_per_rank
from isobit.simulator.program.process_state import replaced, restore_state, save_state
from isobit.simulator.program.threads import threads_of_ranks
from isobit.simulator.program.waits import cooperative_locks, cooperative_selection, virtual_time
from isobit.simulator.run import Run
from isobit.simulator.torch import backend
from isobit.simulator.torch.backward_pass import modes_in_backward


class GroupTables:
    """Replaces torch's table of process groups: each rank has its own; other threads keep the process's."""

    def __init__(self, plain: Any) -> None:
        """Keep the table of the process."""
        vars(self).update(_plain=plain)

    def _table(self) -> Any:
        rank = ranks.owner()
        if rank is None:
            return self._plain
        if rank.groups is None:
            rank.groups = SimpleNamespace(
                default_pg=None,
                pg_map={},
                pg_names={},
                pg_group_ranks={},
                pg_backend_config={},
                group_count=0,
                tags_to_pg={},
                pg_to_tag={},
                pg_coalesce_state={},
                comms=[],
                pg_config_info=[],
            )
        return rank.groups

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the table of the current rank."""
        return getattr(self._table(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the table of the current rank."""
        setattr(self._table(), name, value)


@contextmanager
def thread_isolation() -> Iterator[None]:
    """Make torch's C++ registry of process groups one per thread."""
    switch: Any = torch._C._distributed_c10d
    switch._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        switch._set_thread_isolation_mode(False)


@contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore random numbers, default dtype, warnings and excepthook after the run."""
    state, hook = save_state(), sys.excepthook
    try:
        with warnings.catch_warnings():
            yield
    finally:
        restore_state(state)
        sys.excepthook = hook


def rendezvous_of(run: Run, plain: Any) -> Any:
    """Return a replacement for torch's `rendezvous` that yields the store of the run."""
    count = run.settings.ranks

    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        if not ranks.inside():
            yield from plain(url, rank, world_size, **options)
            return
        here = ranks.current()
        given = (rank if rank >= 0 else here.index, world_size if world_size > 0 else count)
        if given != (here.index, count):
            raise MismatchError(
                expected=f"init_process_group(rank={here.index}, world_size={count})",
                received=f"init_process_group(rank={given[0]}, world_size={given[1]})",
                remedy="pass the rank that the function receives, and the number of ranks",
                ranks=[here.index],
            )
        yield run.store, *given

    return rendezvous


def new_group_of(run: Run, plain: Any) -> Any:
    """Return a replacement for torch's group factory that uses our backend, whichever the script names."""

    def new_group(
        size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any
    ) -> Any:
        if ranks.inside():
            backend = dist.Backend("isobit")
            everyone = tuple(range(run.settings.ranks))
            run.note_group(ranks.current(), str(rest[1]), tuple(members) or everyone)
            options["backend_options"] = options["device_id"] = None
        return plain(size, rank, members, backend, *rest, **options)

    return new_group


def timeout_of(plain: Any) -> Any:
    """Return a replacement for torch's default timeout that does not require the backend to be compiled in."""

    def default_timeout(backend: Any) -> Any:
        return c10d.default_pg_timeout if ranks.inside() else plain(backend)

    return default_timeout


def monitored_barrier_of(plain: Any) -> Any:
    """Return a replacement for `monitored_barrier`, which torch supports on gloo only: a plain barrier."""

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        if not ranks.inside():
            plain(group, timeout, wait_all_ranks)
            return
        dist.barrier(group)

    return monitored_barrier


class Ended:
    """What `spawn(join=False)` returns: the function has returned already."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Return True."""
        return True


def init_rpc_of(plain: Any) -> Any:
    """Return a replacement for `torch.distributed.rpc.init_rpc`, whose agents wait in C++ for other processes."""

    def init_rpc(*args: Any, **options: Any) -> Any:
        if not ranks.inside():
            return plain(*args, **options)
        raise UnsupportedError(
            expected="communication by process groups of torch.distributed",
            received="torch.distributed.rpc, which isobit.simulator does not support",
            remedy="simulate the parts of the script that use collectives, send and recv, and test RPC with torchrun",
        )

    return init_rpc


def spawn_of(plain: Any) -> Any:
    """Return a replacement for `torch.multiprocessing.spawn`: each rank runs the function of the process of its number.

    The lines of the script around the call run on every rank, not once.
    """

    def spawn(
        fn: Any,
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        if not ranks.inside():
            return plain(fn, args, nprocs, join, daemon, start_method)
        rank = ranks.current()
        if nprocs != rank.world_size or rank.spawned:
            again = ", inside a function that was spawned" if rank.spawned else ""
            raise UnsupportedError(
                expected=f"torch.multiprocessing.spawn once, of as many processes as ranks: {rank.world_size}",
                received=f"nprocs={nprocs}{again}",
                remedy=f"simulate the script on {nprocs} ranks (--ranks), or replace this call by "
                "isobit.simulator.spawn and start the script with python",
            )
        rank.spawned = True
        try:
            fn(rank.index, *args)
        finally:
            rank.spawned = False
        return None if join else Ended()

    return spawn


def signal_of(plain: Any) -> Any:
    """Return a replacement for `signal.signal` that does nothing on a rank: ranks receive no signals."""

    def set_handler(number: int, handler: Any) -> Any:
        return signal.SIG_DFL if ranks.inside() else plain(number, handler)

    return set_handler


def alarm_of(plain: Any, none: Any) -> Any:
    """Return a replacement for `signal.alarm` that does nothing on a rank: an alarm would end the process."""

    def set_alarm(*args: Any) -> Any:
        return none if ranks.inside() else plain(*args)

    return set_alarm


@contextmanager
def memory_returned() -> Iterator[None]:
    """Make glibc return the memory that the threads of ranks freed, which it keeps in one arena each."""
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextmanager
def compiling(ranks_count: int) -> Iterator[None]:
    """Raise Dynamo's recompile limits, which are per function of the process, and reset it afterwards."""
    plain, limits = torch.compile, dict[str, int]()

    def compile_on_rank(*args: Any, **options: Any) -> Any:
        if ranks.inside() and not limits:
            config: Any = torch._dynamo.config
            for name in ("recompile_limit", "accumulated_recompile_limit"):
                limits[name] = getattr(config, name)
                setattr(config, name, limits[name] * ranks_count)
        return plain(*args, **options)

    with replaced(torch, "compile", compile_on_rank):
        try:
            yield
        finally:
            for name, limit in limits.items():
                setattr(torch._dynamo.config, name, limit)
            if limits:
                torch._dynamo.reset()


@contextmanager
def installed(run: Run) -> Iterator[None]:
    """Install everything, and undo it in reverse order whatever happens."""
    barrier = monitored_barrier_of(c10d.monitored_barrier)
    with ExitStack() as stack:
        for context in (
            memory_returned(),
            kept_process_state(),
            backend.serving(run),
            replaced(c10d, "_world", GroupTables(c10d._world)),
            replaced(c10d, "rendezvous", rendezvous_of(run, vars(c10d)["rendezvous"])),
            replaced(
                c10d, "_new_process_group_helper", new_group_of(run, c10d._new_process_group_helper)
            ),
            replaced(c10d, "_get_default_timeout", timeout_of(c10d._get_default_timeout)),
            replaced(c10d, "monitored_barrier", barrier),
            replaced(dist, "monitored_barrier", barrier),
            *(
                replaced(torch.multiprocessing, name, spawn_of(vars(torch.multiprocessing)[name]))
                for name in ("spawn", "start_processes")
            ),
            *(
                replaced(rpc, name, init_rpc_of(vars(rpc)[name]))
                for name in ("init_rpc",)
                if rpc.is_available()
            ),
            replaced(signal, "signal", signal_of(signal.signal)),
            replaced(signal, "alarm", alarm_of(signal.alarm, 0)),
            replaced(signal, "setitimer", alarm_of(signal.setitimer, (0.0, 0.0))),
            replaced(c10d, "_backend", c10d._backend),
            replaced(c10d, "_default_pg_init_method", c10d._default_pg_init_method),
            compiling(run.settings.ranks),
            thread_isolation(),
            watched_functions(),
            modes_in_backward(),
            served_functions(run.settings.accelerator),
            nullcontext() if run.training is None else run.training.installed(),
            variables_per_rank(),
            folder_per_rank(),
            virtual_time(),
            cooperative_locks(),
            cooperative_selection(),
            threads_of_ranks(),
        ):
            stack.enter_context(context)
        yield
