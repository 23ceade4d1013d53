"""Puts a world under torch.distributed while it runs, and takes all of it back."""

from __future__ import annotations

import ctypes
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing

from isobit.errors import MismatchError, UnsupportedError
from isobit.simulator import rank as ranks
from isobit.simulator.program.clock import replaced, virtual_time
from isobit.simulator.program.events import cooperative_selection
from isobit.simulator.program.folder import folder_per_rank
from isobit.simulator.program.locks import cooperative_locks
from isobit.simulator.program.threads import threads_of_ranks
from isobit.simulator.program.variables import variables_per_rank
from isobit.simulator.torch import backend

if TYPE_CHECKING:
    from isobit.simulator.world import World


class WorldPerRank:
    """Torch's table of process groups: one per rank, for all its threads; other threads keep the process's own."""

    def __init__(self, plain: Any) -> None:
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
        return getattr(self._table(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._table(), name, value)


@contextmanager
def thread_isolation() -> Iterator[None]:
    """Torch's C++ registry of process groups, per thread."""
    switch: Any = torch._C._distributed_c10d
    switch._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        switch._set_thread_isolation_mode(False)


@contextmanager
def kept_process_state() -> Iterator[None]:
    """What ranks do to random numbers, the default dtype and excepthook ends with the world."""
    state, hook = ranks.save_state(), sys.excepthook
    try:
        with warnings.catch_warnings():
            yield
    finally:
        ranks.restore_state(state)
        sys.excepthook = hook


def rendezvous_of(world: World, plain: Any) -> Any:
    def rendezvous(
        url: str, rank: int = -1, world_size: int = -1, **options: Any
    ) -> Iterator[tuple[Any, int, int]]:
        if not ranks.inside():
            yield from plain(url, rank, world_size, **options)
            return
        here = ranks.current()
        given = (rank if rank >= 0 else here.index, world_size if world_size > 0 else world.ranks)
        if given != (here.index, world.ranks):
            raise MismatchError(
                expected=f"rank {here.index} of {world.ranks} to say so",
                received=f"init_process_group(rank={given[0]}, world_size={given[1]})",
                remedy="pass the rank that the function is given, and the number of ranks of the world",
                ranks=[here.index],
            )
        yield world.store, *given

    return rendezvous


def helper_of(world: World, plain: Any) -> Any:
    """Whatever backend a script names, inside a world the world serves it."""

    def new_group(
        size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any
    ) -> Any:
        if ranks.inside():
            backend = dist.Backend("isobit")
            world.vote(ranks.current(), str(rest[1]), tuple(members) or tuple(range(world.ranks)))
            options["backend_options"] = options["device_id"] = None
        return plain(size, rank, members, backend, *rest, **options)

    return new_group


def timeout_of(plain: Any) -> Any:
    """Torch warns where a backend is not compiled in; here none has to be."""

    def default_timeout(backend: Any) -> Any:
        return c10d.default_pg_timeout if ranks.inside() else plain(backend)

    return default_timeout


def monitored_barrier_of(plain: Any) -> Any:
    """Torch allows it on gloo alone; here each barrier names who is missing."""

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        if not ranks.inside():
            plain(group, timeout, wait_all_ranks)
            return
        dist.barrier(group)

    return monitored_barrier


def spawn_of(plain: Any) -> Any:
    """A script that starts its own processes would start as many on every rank, outside the world."""

    def spawn(*args: Any, **options: Any) -> Any:
        if not ranks.inside():
            return plain(*args, **options)
        raise UnsupportedError(
            expected="a program that a launcher starts once per rank",
            received="torch.multiprocessing.spawn on a rank",
            remedy="call the function itself, with the rank that torchrun puts into the variable RANK; or leave "
            "`isobit simulate` and start the script with python, with isobit.simulator.spawn in the place of this call",
        )

    return spawn


def signal_of(plain: Any) -> Any:
    """Python takes handlers on the main thread alone; no signal comes to a rank, so that one is never called."""

    def set_handler(number: int, handler: Any) -> Any:
        return signal.SIG_DFL if ranks.inside() else plain(number, handler)

    return set_handler


def alarm_of(plain: Any, none: Any) -> Any:
    """No signal comes to a rank, so no alarm does; the default action of one would end the process."""

    def set_alarm(*args: Any) -> Any:
        return none if ranks.inside() else plain(*args)

    return set_alarm


@contextmanager
def memory_returned() -> Iterator[None]:
    """glibc keeps what the threads of ranks freed, an arena each; where it is glibc, it gives that back."""
    try:
        yield
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextmanager
def compiling(world: World) -> Iterator[None]:
    """Dynamo keeps compiled code per function of the process: it needs room for every rank, and is emptied after."""
    plain, limits = torch.compile, dict[str, int]()

    def compile_on_rank(*args: Any, **options: Any) -> Any:
        if ranks.inside() and not limits:
            config: Any = torch._dynamo.config
            for name in ("recompile_limit", "accumulated_recompile_limit"):
                limits[name] = getattr(config, name)
                setattr(config, name, limits[name] * world.ranks)
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
def installed(world: World) -> Iterator[None]:
    """All of it, undone in reverse whatever happens."""
    backend.register()
    barrier = monitored_barrier_of(c10d.monitored_barrier)
    with ExitStack() as stack:
        for context in (
            memory_returned(),
            kept_process_state(),
            replaced(c10d, "_world", WorldPerRank(c10d._world)),
            replaced(c10d, "rendezvous", rendezvous_of(world, vars(c10d)["rendezvous"])),
            replaced(
                c10d, "_new_process_group_helper", helper_of(world, c10d._new_process_group_helper)
            ),
            replaced(c10d, "_get_default_timeout", timeout_of(c10d._get_default_timeout)),
            replaced(c10d, "monitored_barrier", barrier),
            replaced(dist, "monitored_barrier", barrier),
            replaced(
                torch.multiprocessing, "spawn", spawn_of(vars(torch.multiprocessing)["spawn"])
            ),
            replaced(signal, "signal", signal_of(signal.signal)),
            replaced(signal, "alarm", alarm_of(signal.alarm, 0)),
            replaced(signal, "setitimer", alarm_of(signal.setitimer, (0.0, 0.0))),
            replaced(c10d, "_backend", c10d._backend),
            replaced(c10d, "_default_pg_init_method", c10d._default_pg_init_method),
            compiling(world),
            thread_isolation(),
            nullcontext() if world.watch.training is None else world.watch.training.installed(),
            variables_per_rank(),
            folder_per_rank(),
            virtual_time(world),
            cooperative_locks(),
            cooperative_selection(),
            threads_of_ranks(world),
        ):
            stack.enter_context(context)
        yield
