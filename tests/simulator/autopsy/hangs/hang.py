"""A recorded hang: a small program whose ranks hang in the simulator, which writes their flight-recorder dumps.

Each has the ranks at fault and the call in which the others wait, as planted: `isobit autopsy` must name both. The
files may be changed after the run, as on a cluster: ring buffers drop calls, ranks die without a dump.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from isobit.errors import SimulationError
from isobit.simulator import World
from isobit.simulator.faults import Fault

HANGS: dict[str, Hang] = {}
Program = Callable[[int, bool], object]  # (rank, planted): with planted false it is the right twin


@dataclass(frozen=True)
class Hang:
    """A recorded hang.

    Attributes:
        ranks: The ranks at fault.
        call: Words of the description of the call that shows it.
        absent: The ranks that did not join that call, if they are not those at fault.
        kind: "deadlock" or "mismatch".
        change: Changes the files afterwards.
    """

    name: str
    title: str
    program: Program
    ranks: tuple[int, ...]
    call: str
    absent: tuple[int, ...]
    kind: str
    world: int
    faults: tuple[Fault, ...]
    sends: str
    change: Callable[[Path], None]


def hang(
    title: str,
    ranks: tuple[int, ...],
    call: str,
    *,
    absent: tuple[int, ...] | None = None,
    kind: str = "deadlock",
    world: int = 4,
    faults: tuple[Fault, ...] = (),
    sends: str = "buffered",
    change: Callable[[Path], None] = lambda folder: None,
    name: str = "",
) -> Callable[[Program], Program]:
    """Add a program to the recorded hangs."""

    def add(program: Program) -> Program:
        called = name or program.__name__.replace("_", "-")
        assert called not in HANGS, called
        shown = ranks if absent is None else absent
        HANGS[called] = Hang(
            called, title, program, ranks, call, shown, kind, world, faults, sends, change
        )
        return program

    return add


def record(case: Hang, folder: Path, planted: bool = True) -> SimulationError | None:
    """Run a case, write its dumps, and return what the simulator found."""
    faults = case.faults if planted else ()
    world = World(case.world, 3, faults, sends=case.sends, flight_recorder=folder)
    found = None
    try:
        world.run(case.program, planted)
    except SimulationError as error:
        found = error
    if planted:
        case.change(folder)
    return found


def drop_calls(kept: Callable[[int], int]) -> Callable[[Path], None]:
    """Return a change that leaves the last `kept(rank)` calls of each buffer."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            dump = pickle.loads(path.read_bytes())
            dump["entries"] = dump["entries"][-kept(int(path.name.split("_")[-1])) :]
            path.write_bytes(pickle.dumps(dump, 2))

    return change


def without(*ranks: int) -> Callable[[Path], None]:
    """Return a change that removes the dumps of some ranks."""

    def change(folder: Path) -> None:
        for rank in ranks:
            (folder / f"nccl_trace_rank_{rank}").unlink()

    return change


def sums(count: int, size: int = 4) -> None:
    """Make some all-reduces."""
    for _ in range(count):
        dist.all_reduce(torch.ones(size))
