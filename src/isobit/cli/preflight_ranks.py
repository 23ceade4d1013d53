"""The program of `isobit preflight --ranks N`: a script on simulated ranks, each under an observer of its own.

Its only argument is a JSON object. The folder of this file is taken off the search path before anything is imported.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
    del sys.path[0]

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from isobit import bits
from isobit.errors import ArgumentError, RankFailedError, SimulationError
from isobit.guards.module_replay import unwrapped
from isobit.guards.trial_run.counts import Counts, counts_are_as_configured
from isobit.guards.trial_run.judging import Found, NotJudged
from isobit.guards.trial_run.micro_batches import ranks_weigh_the_same
from isobit.guards.trial_run.observer import Observer, StepsDone
from isobit.guards.trial_run.report import PreflightFinding, PreflightReport
from isobit.guards.trial_run.run import COUNTS, Orders, conclude
from isobit.guards.trial_run.script import leave
from isobit.majority import count_votes
from isobit.simulator.program.script import Script
from isobit.simulator.result import Result
from isobit.simulator.world import World

REPLICAS = "replicas agree, and train on different data"
SHARES = "ranks are parts of one batch"
NORMS = "norms of ranks with one batch stay equal"
LEFT_BY_THE_END = "orphan"  # a program that is ended after a step leaves what it has just started
LAST_LINES = 15
# What the simulator and a rank's own checks both find: one cause, so that it is named once.
SAME_CAUSE = {
    "gradients-kept": ("not-zeroed",),
    "not-updated": ("not-in-optimizer",),
    "order-repeated": ("epochs-alike",),
    "dropout-on": ("eval-is-random",),
    "not-finite": ("nonfinite-loss", "nonfinite-gradient"),
}


def preflight_ranks(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    ranks: int,
    steps: int = 3,
    config: Mapping[str, Any] | None = None,
    declare: Mapping[str, Any] | None = None,
    device: str = "auto",
) -> PreflightReport:
    """Run a script on simulated ranks as torchrun would, and report what is wrong with its first steps.

    Args:
        script: The script. Of several ranks, it calls init_process_group itself.
        arguments: Its command-line arguments.
        ranks: The number of ranks.
        device: The kind of device that the script finds, one per rank, served by the CPU: "cuda", "xpu" or "npu"; "cpu"
            for none, "auto" for the kind that it names.
        steps: As of `isobit.guards.preflight`; so are `config` and `declare`.
        config: See there.
        declare: See there.

    Raises:
        ArgumentError: If the script fails before its first step, takes none, or its ranks do not communicate.
    """
    orders = Orders.of(config, declare)
    program = Script(Path(script), arguments)
    seen = [orders.observer(steps) for _ in range(ranks)]
    with ExitStack() as stack:
        for observer in seen:
            observer.thread = 0  # no thread has this number: nothing counts before the rank starts
            observer.install()
            stack.callback(observer.remove)
        body = stack.enter_context(program.installed(capture=True))

        def run(rank: int) -> PreflightReport | None:
            seen[rank].thread = threading.get_ident()
            with suppress(StepsDone):
                body(rank)
            seen[rank].finish()
            if not seen[rank].watches:
                return None
            return conclude(seen[rank], orders, leave_out=(COUNTS,))

        accelerator = {"auto": program.accelerator, "cpu": ""}.get(device, device)
        world = World(ranks, watch=("bits", "training"), strict=False, accelerator=accelerator)
        found, result = run_world(world, run, program)
    reports = {r: v for r, v in enumerate(result.values) if isinstance(v, PreflightReport)}
    is_silent = ranks > 1 and not result.calls
    if is_silent or (not reports and not found):
        raise ArgumentError(
            expected="a script whose ranks communicate and take an optimizer step",
            received=f"{result.calls} collectives, and steps on {len(reports)} of {ranks} ranks",
            remedy="name the script that torchrun starts; leave --ranks out for a script of one process",
        )
    return combine(reports, found, seen, orders)


def run_world(world: World, run: Any, program: Script) -> tuple[list[PreflightFinding], Result]:
    """Run all ranks; return the simulator's findings, and what each rank returned.

    Raises:
        ArgumentError: If a rank fails by itself.
    """
    errors: list[SimulationError] = []
    try:
        result = world.run(run, init=False)
    except RankFailedError as error:
        rank = min(error.ranks, default=0)
        lines = program.errors.text(rank, world.settings.ranks).splitlines()[-LAST_LINES:]
        raise ArgumentError(
            expected=f"a script that runs on {world.settings.ranks} ranks up to its optimizer's steps",
            received=error.received + ("" if not lines else ", after:\n" + "\n".join(lines)),
            remedy="isobit simulate shows where each rank was; words after -- go to the script",
        ) from error
    except SimulationError as error:
        if error.result is None:
            raise
        result, errors = error.result, [error]
    errors += [each for each in result.findings if each not in errors]
    found = [
        PreflightFinding(
            error.kind.replace(" ", "-"), "error", error.one_line, ranks=tuple(error.ranks)
        )
        for error in errors
        if error.kind != LEFT_BY_THE_END
    ]
    return found, result


def combine(
    reports: Mapping[int, PreflightReport],
    found: list[PreflightFinding],
    seen: list[Observer],
    orders: Orders,
) -> PreflightReport:
    """Put the reports of all ranks together; a check counts as made if every rank made it."""
    merged: dict[PreflightFinding, list[int]] = {}
    for rank, report in reports.items():
        for finding in report.findings:
            merged.setdefault(finding, []).append(rank)
    own = [replace(each, ranks=tuple(where)) for each, where in merged.items()]
    skipped: dict[str, str] = {}
    for rank, report in reports.items():
        for name, reason in report.not_judged.items():
            skipped.setdefault(name, f"rank {rank}: {reason}")
    names = dict.fromkeys(name for report in reports.values() for name in report.judged)
    judged = [name for name in names if name not in skipped]
    starts = [tuple(each.before.values()) for each in seen]
    if found or len(set(starts)) < len(starts):
        judged.append(REPLICAS)
    else:
        skipped[REPLICAS] = "no two ranks start with the same parameters"
    size = orders.declared.global_batch_size if orders.declared else None
    counts = counts_of(seen)
    for name, check in (
        (COUNTS, counts_are_as_configured(counts, orders.config, size)),
        (SHARES, ranks_weigh_the_same([each.losses.calls for each in seen])),
        (NORMS, norms_stay_replicas(seen)),
    ):
        try:
            for each in check:
                own.append(PreflightFinding(*each))
            judged.append(name)
        except NotJudged as reason:
            skipped[name] = str(reason)
    first = next(iter(reports.values()), PreflightReport(0, 0, 0, (), ()))
    return PreflightReport(
        min((report.steps for report in reports.values()), default=0),
        first.models,
        first.parameters,
        (*without_same_cause(found, own), *own),
        tuple(judged),
        skipped,
        first.dtypes,
        len(seen),
    )


def without_same_cause(
    found: Sequence[PreflightFinding], own: Sequence[PreflightFinding]
) -> list[PreflightFinding]:
    """Leave out the simulator's findings whose cause the ranks' own checks name, for the same ranks."""
    ranks: dict[str, set[int]] = {}
    for each in own:
        ranks.setdefault(each.rule, set()).update(each.ranks)
    return [
        each
        for each in found
        if not any(ranks.get(rule) == {*each.ranks} for rule in SAME_CAUSE.get(each.rule, ()))
    ]


def counts_of(seen: list[Observer]) -> Counts:
    """Return the counts of a step over all ranks; ranks that had the same batch count once."""
    own = [each.counts() for each in seen]
    distinct = {each.batches[0]: count.per_step for each, count in zip(seen, own, strict=True)}
    sizes = [size for size in distinct.values() if size is not None]
    return replace(
        own[0],
        ranks=len(seen),
        per_step=sum(sizes) if len(sizes) == len(distinct) else None,
        rows=own[0].rows if len({count.rows for count in own}) == 1 else None,
    )


def norms_stay_replicas(seen: list[Observer]) -> Iterator[Found]:
    """Check that ranks that share a batch, as tensor-parallel ones do, keep the same norms.

    Raises:
        NotJudged: If no two ranks share a batch and a norm with the same bits at its start.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, each in enumerate(seen):
        groups.setdefault(each.batches[0], []).append(rank)
    judged = 0
    for ranks in (group for batch, group in groups.items() if batch and len(group) > 1):
        held = {rank: norm_digests(seen[rank]) for rank in ranks}
        names = [n for n in held[ranks[0]] if len({held[r].get(n, ("",))[0] for r in ranks}) == 1]
        judged += len(names)
        for name in names:
            vote = count_votes({rank: held[rank][name][1] for rank in ranks})
            if not vote.is_unanimous:
                yield (
                    "norms-differ",
                    "error",
                    f"{name} was equal on ranks {ranks}, which share a batch, and differs after {seen[0].steps} "
                    f"steps: {vote}",
                )
    if not judged:
        raise NotJudged("no two ranks share a batch and a norm")


def norm_digests(seen: Observer) -> dict[str, tuple[str, str]]:
    """Return the digests of the parameters of norms, before the first step and now."""
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    return {
        f"{path or type(module).__name__}.{name}": (seen.before[id(p)], bits.digest(p.detach()))
        for model, _ in seen.roots.values()
        for path, module in unwrapped(model).named_modules()
        for name, p in module.named_parameters(recurse=False)
        if isinstance(module, norms) and id(p) in seen.before
    }


def main() -> int:
    """Run the script that the argument names, and write the report."""
    given = json.loads(sys.argv[1])
    options = {name: given[name] for name in ("ranks", "steps", "config", "declare", "device")}
    try:
        report = asdict(preflight_ranks(given["script"], given["arguments"], **options))
    except ArgumentError as error:
        parts = ("expected", "received", "remedy")
        report = {"error": {part: getattr(error, part) for part in parts}}
    with open(given["record"], "w", encoding="utf-8") as record:
        json.dump(report, record)
    return 0


if __name__ == "__main__":
    leave(main())
