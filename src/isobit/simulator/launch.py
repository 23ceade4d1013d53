"""Ways into a world that programs know: spawn, a script, and the replay of a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isobit.simulator.checkers.verdict import Result
from isobit.simulator.faults import Fault
from isobit.simulator.program.script import Script
from isobit.simulator.trace import Trace
from isobit.simulator.world import World


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    seed: int = 0,
) -> Result:
    """torch.multiprocessing.spawn, in one process: `fn(rank, *args)`, which initialises torch.distributed itself."""
    return World(nprocs, seed).run(fn, *args, init=False)


def run_script(
    path: str | Path,
    argv: Sequence[str] = (),
    ranks: int = 2,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    **options: Any,
) -> Result:
    """Runs a script as torchrun would: every rank executes the file as `__main__`; values are their namespaces."""
    with Script(Path(path), argv).installed() as body:
        return World(ranks, seed, faults, **options).run(body, init=False)


def replay(trace: Trace, function: Callable[..., Any], *args: Any, init: bool = True) -> Result:
    """Runs a recorded schedule again; ReplayError says where this run departs from it."""
    world = World(trace.ranks, trace.seed, trace.faults, delays=trace.delays, sends=trace.sends)
    return world.run(function, *args, init=init, recorded=trace)
