"""What a planted bug is: a program with a right and a wrong form, and what must be said of the wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isobit.simulator.faults import Fault

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


def one(seed: int) -> tuple[int, ...]:
    """One rank, another with each seed."""
    return (seed % 4,)


def all_four(seed: int) -> tuple[int, ...]:
    """Every rank does it wrong."""
    return (0, 1, 2, 3)


def planted(
    title: str,
    kind: str,
    culprits: Callable[[int], tuple[int, ...]] = one,
    *,
    faults: Callable[[int], tuple[Fault, ...]] = lambda seed: (),
    watch: tuple[str, ...] = ("bits", "reads", "training"),
    against_one: bool = False,
) -> Callable[[Program], Program]:
    """Adds a program to the catalogue, under its own name."""

    def add(program: Program) -> Program:
        name = program.__name__.replace("_", "-")
        assert name not in CATALOGUE, name
        CATALOGUE[name] = Bug(name, title, program, kind, culprits, faults, watch, against_one)
        return program

    return add
