"""Runs a script in many worlds, a seed each: what was found in each, grouped, and whether ranks print the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from isobit.errors import BusyError, IsobitError, RankFailedError, SimulationError
from isobit.simulator.checkers.single_rank import compare_with_one
from isobit.simulator.faults import draw_faults
from isobit.simulator.program.script import Script
from isobit.simulator.world import World

WATCHES = ("bits", "reads", "training")
LAST_LINES = 4


@dataclass(frozen=True)
class Plan:
    """What is asked of a sweep."""

    script: Script
    ranks: int
    seeds: Sequence[int]
    fault_kinds: tuple[str, ...] = ()
    fault_calls: int = 20
    watch: tuple[str, ...] = WATCHES
    ignore: Collection[str] = ()
    sends: str = "buffered"
    one_worker: bool = False
    tolerance: float = 1e-4
    patience: float = 120.0
    """Real seconds that one turn of a rank may take."""


@dataclass(frozen=True)
class Found:
    """One finding, in words."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    stacks: dict[int, tuple[str, ...]]
    cause: str = ""
    remedy: str = ""
    """Of a refusal that a rank met; empty where Python or the script itself raised."""
    wrote: str = ""
    """The last lines that the failed rank wrote to its error stream: argparse says there what it misses."""


@dataclass(frozen=True)
class SeedRun:
    """One world: its seed, what was planted and found, what each rank printed, the trace's digest, and its calls."""

    seed: int
    faults: tuple[str, ...]
    found: tuple[Found, ...]
    printed: tuple[str, ...]
    digest: str
    calls: int
    """Of torch.distributed, by all ranks: without one, nothing was tried."""


@dataclass
class Group:
    """Findings of one kind, with every rank and seed that they came up with; the first stands for them."""

    kind: str
    first: Found
    ranks: set[int] = field(default_factory=set)
    seeds: list[int] = field(default_factory=list)


def run_seeds(plan: Plan) -> Iterator[SeedRun]:
    """One after the other; none after one in which a rank was busy for all its time, as it would be in the next."""
    for seed in plan.seeds:
        run = run_seed(plan, seed)
        yield run
        if any(found.kind == BusyError.kind for found in run.found):
            return


def run_seed(plan: Plan, seed: int) -> SeedRun:
    """One world, with its findings instead of an exception."""
    faults = (
        draw_faults(seed, plan.ranks, plan.fault_calls, 1, plan.fault_kinds)
        if plan.fault_kinds
        else ()
    )
    world = World(
        plan.ranks, seed, faults, watch=plan.watch, sends=plan.sends, patience=plan.patience
    )
    world.ignore = plan.ignore
    errors: list[SimulationError] = []
    with plan.script.installed(capture=True) as body:
        try:
            if plan.one_worker:
                result = compare_with_one(world, body, init=False, tolerance=plan.tolerance)
            else:
                result = world.run(body, init=False)
            errors = list(result.findings)
        except SimulationError as error:
            result = error.result
            errors = [
                error,
                *(other for other in (result.findings if result else ()) if other is not error),
            ]
    printed = tuple(plan.script.output.text(rank, plan.ranks) for rank in range(plan.ranks))
    found = tuple(in_words(error, plan) for error in errors if error.kind not in plan.ignore)
    calls = sum(rank.calls for rank in world.members)
    return SeedRun(
        seed, tuple(map(str, faults)), found, printed, result.digest if result else "", calls
    )


def in_words(error: SimulationError, plan: Plan) -> Found:
    """What outlives the run; of a rank's own failure, its last words too."""
    cause = remedy = wrote = ""
    if isinstance(error, RankFailedError) and error.__cause__ is not None:
        cause, remedy = (
            error.received,
            error.remedy if isinstance(error.__cause__, IsobitError) else "",
        )
        wrote = "\n".join(
            plan.script.errors.text(min(error.stacks), plan.ranks).splitlines()[-LAST_LINES:]
        )
    text = error.one_line
    stacks = {rank: tuple(lines) for rank, lines in error.stacks.items()}
    return Found(error.kind, error.ranks, text, stacks, cause, remedy, wrote)


def group_findings(runs: Sequence[SeedRun]) -> list[Group]:
    """By kind, in the order in which they came up."""
    groups: dict[str, Group] = {}
    for run in runs:
        for found in run.found:
            group = groups.setdefault(found.kind, Group(found.kind, found))
            group.ranks |= set(found.ranks)
            if run.seed not in group.seeds:
                group.seeds.append(run.seed)
    return list(groups.values())


def compare_prints(
    runs: Sequence[SeedRun], wanted: Callable[[SeedRun], bool] = lambda run: not run.found
) -> str:
    """Empty if all runs printed the same on every rank; else where the first one departs."""
    complete = [run for run in runs if wanted(run)]
    for run in complete[1:]:
        for rank, (left, right) in enumerate(zip(complete[0].printed, run.printed, strict=True)):
            if left != right:
                lines = zip([*left.splitlines(), ""], [*right.splitlines(), ""], strict=False)
                at, (a, b) = next((i, pair) for i, pair in enumerate(lines) if pair[0] != pair[1])
                return f"rank {rank}, line {at + 1}: {a!r} with seed {complete[0].seed}, {b!r} with seed {run.seed}"
    return ""
