"""Ways into a world that programs know: spawn, a script, and the replay of a trace."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isobit.simulator.faults import Fault
from isobit.simulator.trace import Trace
from isobit.simulator.world import Result, World


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
    path: str | Path, argv: Sequence[str] = (), ranks: int = 2, seed: int = 0, faults: Sequence[Fault] = (), **options: Any
) -> Result:
    """Runs a script as torchrun would: every rank executes the file as `__main__`, in a namespace of its own."""
    script = str(path)
    kept_argv, kept_path, kept_main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).resolve().parent))

    def body(rank: int) -> dict[str, Any]:
        return run_as_main(script)

    try:
        return World(ranks, seed, faults, **options).run(body, init=False)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept_argv, kept_path, kept_main


def run_as_main(script: str) -> dict[str, Any]:
    """The globals that the script leaves."""
    code = compile(Path(script).read_bytes(), script, "exec")
    space: dict[str, Any] = {"__name__": "__main__", "__file__": script, "__builtins__": __builtins__}
    exec(code, space)
    return space


def replay(trace: Trace, function: Callable[..., Any], *args: Any, init: bool = True) -> Result:
    """Runs a recorded schedule again; ReplayError says where this run departs from it."""
    world = World(trace.ranks, trace.seed, trace.faults, delays=trace.delays, sends=trace.sends)
    return world.run(function, *args, init=init, recorded=trace)
