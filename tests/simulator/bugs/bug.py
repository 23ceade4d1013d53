"""A planted bug: a program with a right and a wrong form, and the finding that the wrong one must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from isobit.errors import SimulationError
from isobit.simulator.faults import Fault
from isobit.simulator.single_rank import compare_with_one
from isobit.simulator.world import World

Program = Callable[[int, int, bool], object]
"""(rank, seed, planted): with planted false it is the clean twin."""
CATALOGUE: dict[str, Bug] = {}


@dataclass(frozen=True)
class Bug:
    """A planted bug; `culprits` and `faults` follow the seed, so that no rank is guilty by habit."""

    name: str
    title: str
    program: Program
    kind: str
    culprits: Callable[[int], tuple[int, ...]]
    faults: Callable[[int], tuple[Fault, ...]]
    watch: tuple[str, ...]
    against_one: bool
    ranks: int = 4
    options: dict[str, object] = field(default_factory=dict)


def one(seed: int) -> tuple[int, ...]:
    """One rank, another with each seed."""
    return (seed % 4,)


def all_four(seed: int) -> tuple[int, ...]:
    """Every rank does it wrong."""
    return (0, 1, 2, 3)


def find(bug: Bug, seed: int, wrong: bool) -> SimulationError | None:
    """Return what the simulator finds in the bug, or in its clean twin."""
    world = World(
        bug.ranks, seed, bug.faults(seed) if wrong else (), watch=bug.watch, **bug.options
    )
    try:
        if bug.against_one:
            compare_with_one(world, bug.program, seed, wrong)
        else:
            world.run(bug.program, seed, wrong)
    except SimulationError as error:
        return error
    return None


def blamed(error: SimulationError) -> tuple[int, ...]:
    """The ranks of all findings of its kind: a bug of every rank is found on one rank after the other."""
    alike = (
        [error, *(other for other in error.result.findings if other.kind == error.kind)]
        if error.result
        else [error]
    )
    return tuple(sorted({rank for other in alike for rank in other.ranks}))


def planted(
    title: str,
    kind: str,
    culprits: Callable[[int], tuple[int, ...]] = one,
    *,
    faults: Callable[[int], tuple[Fault, ...]] = lambda seed: (),
    watch: tuple[str, ...] = ("bits", "reads", "training"),
    against_one: bool = False,
    name: str = "",
    **options: object,
) -> Callable[[Program], Program]:
    """Adds a program to the catalogue, under its own name."""

    def add(program: Program) -> Program:
        called = name or program.__name__.replace("_", "-")
        assert called not in CATALOGUE, called
        CATALOGUE[called] = Bug(
            called, title, program, kind, culprits, faults, watch, against_one, options=options
        )
        return program

    return add
