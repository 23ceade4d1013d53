"""`World`: run a torch.distributed program on simulated ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.simulator.accelerator.modules import KINDS
from isobit.simulator.execution import execute
from isobit.simulator.faults import Fault
from isobit.simulator.program.script import Script
from isobit.simulator.result import Result
from isobit.simulator.run import Settings
from isobit.simulator.schedule import Trace


class World:
    """A number of simulated ranks, one thread each; one runs at a time.

    Args:
        ranks: The number of ranks.
        seed: Chooses the schedule: one seed gives one schedule.
        faults: Faults to inject; see `Die`, `Stall`, `Straggle`, `Drop`, `Flip` and `PlantNaN`.
        delays: Whether computation and messages take random virtual time. If not, they take none.
        watch: What else to check: "bits" (data that changes in transit), "finite" (the first NaN or infinity that is
            sent), "reads" (results read before `wait()`), "training" (optimizer steps of replicas), "devices" (ranks
            that use the device of another rank).
        poison: Whether results are NaN until they are waited for.
        sends: "buffered", or "rendezvous" if a send waits for its receiver, as NCCL's may.
        strict: Whether a finding is raised. If not, findings are in `Result.findings`.
        patience: Real seconds that a rank may compute without a call that lets other ranks run.
        lines: Lines of its own code that a rank may run without such a call; None for any number.
        ignore: Kinds of training findings to leave out, such as "gradients differ".
        flight_recorder: A folder for the calls of each rank, in the format of torch's flight recorder; see `isobit
            autopsy`.
        accelerator: "cuda", "xpu" or "npu" if programs shall find such a device per rank, served by CPU tensors.

    Raises:
        ArgumentError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from isobit.simulator import World
        >>> def program(rank, scale):
        ...     x = torch.tensor([scale * rank])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> World(4, seed=1).run(program, 10.0).values
        [60.0, 60.0, 60.0, 60.0]
    """

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
        lines: int | None = None,
        ignore: Collection[str] = (),
        flight_recorder: str | Path | None = None,
        accelerator: str = "",
    ) -> None:
        """Check the arguments; nothing runs yet."""
        if (
            ranks < 1
            or sends not in ("buffered", "rendezvous")
            or any(not 0 <= fault.rank < ranks for fault in faults)
            or accelerator not in ("", *KINDS)
        ):
            raise ArgumentError(
                expected="at least one rank, sends 'buffered' or 'rendezvous', faults of these ranks, and an "
                f"accelerator out of {', '.join(KINDS)} or none",
                received=f"{ranks} ranks, sends {sends!r}, faults {tuple(faults)}, accelerator {accelerator!r}",
                remedy="number ranks from 0",
            )
        self.settings = Settings(
            ranks,
            seed,
            tuple(faults),
            delays=delays,
            watch=tuple(watch),
            poison=poison,
            sends=sends,
            strict=strict,
            patience=patience,
            lines=lines,
            ignore=frozenset(ignore),
            accelerator=accelerator,
            flight_recorder=None if flight_recorder is None else Path(flight_recorder),
        )

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        init: bool = True,
        recorded: Trace | None = None,
    ) -> Result:
        """Call `function(rank, *args)` on every rank.

        Args:
            function: The program of each rank. It may be any code that uses torch.distributed.
            *args: Its arguments after the rank.
            init: Whether to call `torch.distributed.init_process_group` first. Otherwise the program does.
            recorded: A trace that the run must follow; see `replay`.

        Returns:
            What each rank returned, with the trace and the findings.

        Raises:
            SimulationError: The root cause, if a rank fails, the ranks deadlock or, in a strict world, a checker
                finds something. Its attributes are `ranks`, `stacks` and `result`.
            UnsupportedError: If another run is in progress in this process.
        """
        return execute(self.settings, function, args, init, recorded)


# Other ways to start a run: `spawn` as in torch.multiprocessing, `run_script` as torchrun does, and `replay`.


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
