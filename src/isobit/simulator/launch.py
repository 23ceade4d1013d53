"""Other ways to start a run: `spawn` as in torch.multiprocessing, `run_script` as torchrun does, and `replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isobit.simulator.faults import Fault
from isobit.simulator.program.script import Script
from isobit.simulator.result import Result
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
    """Run a function as `torch.multiprocessing.spawn` does, on simulated ranks.

    Args:
        fn: Called as `fn(rank, *args)`; it initialises torch.distributed itself.
        args: Its arguments after the rank.
        nprocs: The number of ranks.
        join: Accepted as torch does, without effect; so are `daemon` and `start_method`.
        daemon: Without effect.
        start_method: Without effect.
        seed: The seed of the schedule.

    Returns:
        The result of the run.

    Raises:
        SimulationError: As `World.run`.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import spawn
        >>> def program(rank, count):
        ...     dist.init_process_group("gloo", rank=rank, world_size=count)
        ...     return dist.get_backend()
        >>> spawn(program, (2,), nprocs=2).values
        ['isobit', 'isobit']
    """
    return World(nprocs, seed).run(fn, *args, init=False)


def run_script(
    path: str | Path,
    argv: Sequence[str] = (),
    ranks: int = 2,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    **options: Any,
) -> Result:
    """Run a script as torchrun does: every rank executes the file as `__main__`.

    Args:
        path: The script.
        argv: Its command-line arguments.
        ranks: The number of ranks.
        seed: The seed of the schedule.
        faults: Faults to inject.
        **options: Further arguments of `World`. A script that names cuda, xpu or npu gets such devices.

    Returns:
        The result of the run; its values are the namespaces of the script on each rank.

    Raises:
        ArgumentError: If the file is no Python script.
        SimulationError: As `World.run`.

    Example:
        >>> import pathlib, tempfile
        >>> from isobit.simulator import run_script
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "script.py"
        >>> _ = path.write_text("import sys; arguments = sys.argv[1:]")
        >>> [names["arguments"] for names in run_script(path, ["--steps", "3"], ranks=2).values]
        [['--steps', '3'], ['--steps', '3']]
    """
    script = Script(Path(path), argv)
    options.setdefault("accelerator", script.accelerator)
    with script.installed() as body:
        return World(ranks, seed, faults, **options).run(body, init=False)


def replay(trace: Trace, function: Callable[..., Any], *args: Any, init: bool = True) -> Result:
    """Run a recorded schedule again.

    Args:
        trace: The trace of an earlier run.
        function: The program that was recorded.
        *args: Its arguments after the rank.
        init: As in `World.run`.

    Returns:
        The result of the run.

    Raises:
        ReplayError: If the run departs from the trace; it names the first event that differs.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import World, replay
        >>> trace = World(2, seed=1).run(lambda rank: dist.barrier()).trace
        >>> replay(trace, lambda rank: dist.barrier()).digest == trace.digest
        True
    """
    world = World(trace.ranks, trace.seed, trace.faults, delays=trace.delays, sends=trace.sends)
    return world.run(function, *args, init=init, recorded=trace)
