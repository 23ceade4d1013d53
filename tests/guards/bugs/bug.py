"""A known training bug: a program with a right and a wrong form, and what must be found in the wrong one.

Five ways to look: `live` (isobit.guards.watch in the loop), `trial` (isobit.guards.preflight), `declared`
(the same with what is frozen), `simulated` (the
checkers of the simulator), and `call`, for checks that a program calls itself. A bug that is not found today has
`finds=None` and says what it awaits; the test fails once it is found, so that the table is corrected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from isobit.errors import SimulationError
from isobit.guards import Event, preflight, watch
from isobit.simulator import World
from tests.guards.watch_groups import grouped

RANKS = 4
CATALOGUE: dict[str, Bug] = {}


@dataclass(frozen=True)
class Found:
    """A finding: its rule or kind, the step if it is known, and the ranks that it names."""

    rule: str
    step: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bug:
    """A planted bug. `group` is "20" for TrainCheck's bugs, "new" for those that it found, "more" for others."""

    name: str
    group: str
    title: str
    by: str
    finds: Found | None
    awaits: str
    program: Callable[..., object]

    def look(self, wrong: bool) -> list[Found]:
        """Run the program, and return what is found in it."""
        return WAYS[self.by](self.program, wrong)


def quiet(model, optimizer, **options):
    """A watch without sinks, closed by whoever reads its findings."""
    return watch(model, optimizer, sinks=[], **grouped(options))


def as_found(event: Event) -> Found:
    """Read an event; the ranks to blame are in its sentence."""
    ranks = re.findall(r"(?:^|from |to )rank (\d+)", event.message)
    return Found(event.name, event.step, tuple(sorted({int(rank) for rank in ranks})))


def live(program, wrong):
    """Programs return the watch, or on simulated ranks the findings of each rank."""
    guard = program(wrong)
    guard.close()
    assert guard.steps > 0 or guard.findings
    return [as_found(event) for event in guard.findings]


def live_on_ranks(program, wrong):
    values = World(RANKS).run(lambda rank: program(rank, wrong)).values
    return unique(as_found(event) for events in values for event in events)


def trial(program, wrong):
    report = preflight(lambda: program(wrong))
    return [Found(finding.rule, finding.step) for finding in report.findings]


def declared(program, wrong):
    """Programs say what is frozen by an attribute."""
    report = preflight(lambda: program(wrong), declare=program.declares)
    return [Found(finding.rule, finding.step) for finding in report.findings]


def simulated(program, wrong):
    try:
        World(RANKS, watch=("bits", "training")).run(lambda rank: program(rank, wrong))
    except SimulationError as error:
        step = re.search(r"step (\d+)", error.received)
        return [Found(error.kind, int(step[1]) if step else None, tuple(sorted(error.ranks)))]
    return []


def call(program, wrong):
    return [as_found(event) for event in program(wrong)]


def unique(found):
    return list(dict.fromkeys(found))


WAYS = {
    "watch": live,
    "watch on 4 ranks": live_on_ranks,
    "preflight": trial,
    "preflight --declare": declared,
    "simulator": simulated,
    "check": call,
}


def planted(name, group, title, by, finds=None, *, awaits=""):
    """Add a program to the catalogue."""
    assert (finds is None) == bool(awaits), "a bug is found, or says what it awaits"

    def add(program):
        assert name not in CATALOGUE, name
        CATALOGUE[name] = Bug(name, group, title, by, finds, awaits, program)
        return program

    return add


def declares(**what):
    """Say what only the author of a program knows."""

    def add(program):
        program.declares = what
        return program

    return add
