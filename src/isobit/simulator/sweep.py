"""Run a script under many seeds, group the findings, and compare what ranks print."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isobit.errors import (
    BusyError,
    IsobitError,
    RankFailedError,
    SimulationError,
    UnsupportedError,
)
from isobit.foundation.engines import LOCAL, open_engine
from isobit.simulator.faults import draw_faults
from isobit.simulator.program.script import Script
from isobit.simulator.single_rank import compare_with_one
from isobit.simulator.world import World

WATCHES = ("bits", "reads", "training", "devices")
TRITON = "site-packages/triton/"  # a part of the paths of its files
LAST_LINES = 4  # of the error stream of a rank that failed


@dataclass(frozen=True)
class Plan:
    """The settings of a sweep; see `World` for those of each run.

    Attributes:
        fault_kinds: Kinds of faults; one is drawn per seed.
        fault_calls: The latest call at which it happens.
        one_worker: Whether to compare each run with a run on one rank.
        tolerance: Of that comparison.
        device: "cuda", "xpu" or "npu" serves such devices, "cpu" none; "auto" those that the script names.
        flight_recorder: A folder for dumps of each rank's calls; of several seeds, a folder in it for each.
    """

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
    flight_recorder: Path | None = None
    device: str = "auto"
    lines: int | None = None


@dataclass(frozen=True)
class Found:
    """One finding in words.

    Attributes:
        cause: What a rank raised that failed by itself.
        remedy: The remedy, if it raised an error of isobit.
        wrote: The last lines that it wrote to its error stream; argparse prints there what is missing.
        note: What else was seen, which may have led to it.
        follows: The kind of another finding of the run that it may follow from.
        unsupported: Whether a rank called what the simulator does not support: the finding is not the script's.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    stacks: dict[int, tuple[str, ...]]
    cause: str = ""
    remedy: str = ""
    wrote: str = ""
    note: str = ""
    follows: str = ""
    unsupported: bool = False


@dataclass(frozen=True)
class SeedRun:
    """The run of one seed.

    Attributes:
        faults: The faults that were injected.
        found: The findings.
        printed: What each rank printed.
        digest: The digest of the trace.
        calls: The communication calls of all ranks; if there are none, nothing was tested.
        not_judged: Checks that could not be made, by name, with the reason.
    """

    seed: int
    faults: tuple[str, ...]
    found: tuple[Found, ...]
    printed: tuple[str, ...]
    digest: str
    calls: int
    not_judged: dict[str, str] = field(default_factory=dict)


@dataclass
class Group:
    """Findings of one kind: the first of them, and the ranks and seeds of all."""

    kind: str
    first: Found
    ranks: set[int] = field(default_factory=set)
    seeds: list[int] = field(default_factory=list)


def run_seeds(plan: Plan, on: str = LOCAL, jobs: int = 1) -> Iterator[SeedRun]:
    """Run each seed; stop after a run in which a rank never let others run, as the next would be the same.

    Args:
        plan: What to run.
        on: The engine whose tasks the seeds are; see `isobit.foundation.engines`.
        jobs: Number of local processes; with 1, seeds run in this one.
    """
    if on == LOCAL and jobs == 1:
        runs = (run_seed(plan, seed) for seed in plan.seeds)
        yield from until_busy(runs)
        return
    with open_engine(on, jobs) as pool:
        tasks = [pool.submit(run_seed, plan, seed) for seed in plan.seeds]
        yield from until_busy(task.result() for task in tasks)  # in the order of seeds
        for task in tasks:
            task.cancel()


def until_busy(runs: Iterable[SeedRun]) -> Iterator[SeedRun]:
    """Yield runs up to the first in which a rank never let others run."""
    for run in runs:
        yield run
        if any(found.kind == BusyError.kind for found in run.found):
            return


def run_seed(plan: Plan, seed: int) -> SeedRun:
    """Run one seed and return its findings instead of raising them."""
    faults = (
        draw_faults(seed, plan.ranks, plan.fault_calls, 1, plan.fault_kinds)
        if plan.fault_kinds
        else ()
    )
    world = World(
        plan.ranks,
        seed,
        faults,
        watch=plan.watch,
        sends=plan.sends,
        patience=plan.patience,
        lines=plan.lines,
        ignore=plan.ignore,
        flight_recorder=dump_folder(plan, seed),
        accelerator=accelerator_of(plan),
    )
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
    digest, calls = (result.digest, result.calls) if result else ("", 0)
    skipped = not_judged(plan, result.not_judged if result else {})
    return SeedRun(seed, tuple(map(str, faults)), found, printed, digest, calls, skipped)


def not_judged(plan: Plan, training: dict[str, str]) -> dict[str, str]:
    """Return the checks that a run did not make: those of training, and those that the plan leaves out."""
    skipped = dict(training)
    for watch in (*WATCHES, "finite"):
        if watch not in plan.watch:
            skipped[watch] = "not in --watch"
    if not plan.one_worker:
        skipped["weights differ, differs from one worker"] = "these need --one-worker"
    skipped |= dict.fromkeys(plan.ignore, "--ignore leaves it out")
    return skipped


def merge_not_judged(runs: Sequence[SeedRun]) -> dict[str, str]:
    """Return what some seed did not judge, with the reason of the first such seed."""
    merged: dict[str, str] = {}
    for run in runs:
        for name, reason in run.not_judged.items():
            merged.setdefault(name, reason)
    return merged


def accelerator_of(plan: Plan) -> str:
    """Return the accelerator of the world."""
    return {"auto": plan.script.accelerator, "cpu": ""}.get(plan.device, plan.device)


def dump_folder(plan: Plan, seed: int) -> Path | None:
    """Return where the dumps of one seed go."""
    if plan.flight_recorder is None or len(plan.seeds) == 1:
        return plan.flight_recorder
    return plan.flight_recorder / f"seed-{seed}"


def in_words(error: SimulationError, plan: Plan) -> Found:
    """Convert an error into words; for a rank that failed by itself, with the end of its error stream."""
    cause = remedy = wrote = ""
    unsupported = isinstance(error, RankFailedError) and isinstance(
        error.__cause__, UnsupportedError
    )
    if isinstance(error, RankFailedError) and error.__cause__ is not None:
        cause, remedy = (
            error.received,
            error.remedy if isinstance(error.__cause__, IsobitError) else "",
        )
        wrote = "\n".join(
            plan.script.errors.text(min(error.stacks), plan.ranks).splitlines()[-LAST_LINES:]
        )
        kernel = triton_call(next(iter(error.stacks.values()), ()))
        if kernel:
            unsupported, cause = True, f"a Triton kernel, which needs a GPU, at {kernel}"
            remedy = "choose the CPU in the script, as by use_cpu=True of transformers and TRL, or leave the kernel out"
    text = error.one_line
    stacks = {rank: tuple(lines) for rank, lines in error.stacks.items()}
    return Found(
        error.kind,
        error.ranks,
        text,
        stacks,
        cause,
        remedy,
        wrote,
        error.note,
        error.follows,
        unsupported,
    )


def triton_call(stack: Sequence[str]) -> str:
    """Return the line that launched a Triton kernel, if Triton's own code failed in it."""
    inside = [TRITON in frame for frame in stack]
    return stack[inside.index(False)] if inside and inside[0] and not all(inside) else ""


def group_findings(runs: Sequence[SeedRun]) -> list[Group]:
    """Group findings by kind, in the order in which the kinds were first found."""
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
    """Describe the first difference between what ranks printed in the runs; empty if there is none."""
    complete = [run for run in runs if wanted(run)]
    for run in complete[1:]:
        for rank, (left, right) in enumerate(zip(complete[0].printed, run.printed, strict=True)):
            if left != right:
                lines = zip([*left.splitlines(), ""], [*right.splitlines(), ""], strict=False)
                at, (a, b) = next((i, pair) for i, pair in enumerate(lines) if pair[0] != pair[1])
                return f"rank {rank}, line {at + 1}: {a!r} with seed {complete[0].seed}, {b!r} with seed {run.seed}"
    return ""
