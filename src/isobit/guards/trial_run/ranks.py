"""The process of `isobit preflight --ranks N`: a script on simulated ranks, each under an observer of its own.

`main` is called in a process of its own: see [Note: what the script finds] in isobit.foundation.script_process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isobit import bits
from isobit.errors import ArgumentError, RankFailedError, SimulationError
from isobit.foundation.majority import count_votes
from isobit.guards.live.module_replay import unwrapped
from isobit.guards.live.optimizer_checks import name_some
from isobit.guards.trial_run.counts import Counts, counts_are_as_configured, steps_suffice
from isobit.guards.trial_run.observer import Observer, StepsDone
from isobit.guards.trial_run.report import (
    Found,
    NotJudged,
    PreflightFinding,
    PreflightReport,
    merge_ranks,
)
from isobit.guards.trial_run.run import COUNTS, LATER, STEPS, Expectations, conclude, refuse_unseen
from isobit.guards.trial_run.script import leave, run_trial
from isobit.guards.trial_run.starting import Request, write_outcome
from isobit.guards.trial_run.step_order import ranks_weigh_the_same
from isobit.simulator.accelerator.modules import kind_in
from isobit.simulator.program.script import Script
from isobit.simulator.result import Result
from isobit.simulator.world import World

# check -> how the simulator's reasons not to make it begin
OF_THE_SIMULATOR = {
    "replicas start and stay equal": "start, gradients and updates",
    "ranks train on different data": "data alike",
}
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
    "not-finite": ("no-targets", "nonfinite-loss", "nonfinite-gradient"),
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
    wanted = Expectations.of(config, declare)
    program = Script(Path(script), arguments)
    seen = [wanted.observer(steps) for _ in range(ranks)]
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
            return (
                conclude(seen[rank], wanted, leave_out=(COUNTS, STEPS))
                if seen[rank].watches
                else None
            )

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
    for rank, each in enumerate(seen):
        if rank not in reports and each.watches:  # the world ended before the rank's last step
            part = conclude(each, wanted, checks=())
            why = {LATER: "ended before its last step by what is found"}
            reports[rank] = replace(part, judged=(), not_judged=why)
    report = combine(reports, found, seen, wanted, result.not_judged)
    refuse_unseen(report)
    return report


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
            remedy="isobit simulate shows where each rank was; arguments after -- are passed to the script",
        ) from error
    except SimulationError as error:
        if error.result is None:
            raise
        result, errors = error.result, [error]
    errors += result.findings
    found = [
        PreflightFinding(
            error.kind.replace(" ", "-"), "error", in_words(error), ranks=tuple(error.ranks)
        )
        for error in errors
        if error.kind != LEFT_BY_THE_END
    ]
    return list(dict.fromkeys(found)), result  # what ends a run is among its findings too


def in_words(error: SimulationError) -> str:
    """Return a finding of the simulator in one line."""
    note = f"; {error.note}" if error.note else ""
    follows = f" (may follow from {error.follows.replace(' ', '-')})" if error.follows else ""
    return f"{error.one_line}{note}{follows}"


def combine(
    reports: Mapping[int, PreflightReport],
    found: list[PreflightFinding],
    seen: list[Observer],
    wanted: Expectations,
    unseen: Mapping[str, str],
) -> PreflightReport:
    """Put the reports of all ranks together; a check counts as made if every rank made it.

    Args:
        reports: The report of each rank.
        found: What the simulator found.
        seen: What each rank did.
        wanted: The configuration and the declaration.
        unseen: What the simulator did not judge, with the reason.
    """
    own = merge_ranks({rank: report.findings for rank, report in reports.items()})
    skipped: dict[str, str] = {}
    for rank, report in reports.items():
        for name, reason in report.not_judged.items():
            skipped.setdefault(name, f"rank {rank}: {reason}")
    names = dict.fromkeys(name for report in reports.values() for name in report.judged)
    judged = [name for name in names if name not in skipped]
    for name, key in OF_THE_SIMULATOR.items() if len(seen) > 1 else ():
        reasons = [w for each, w in unseen.items() if each == "training" or each.startswith(key)]
        if reasons:
            skipped[name] = reasons[0]
        else:
            judged.append(name)
    size = wanted.declared.global_batch_size if wanted.declared else None
    counts = counts_of(seen)
    checks = {
        COUNTS: counts_are_as_configured(counts, wanted.config, size),
        STEPS: steps_suffice(counts, wanted.config, seen[0].peak),
    }
    if len(seen) > 1:
        checks[SHARES] = ranks_weigh_the_same([each.losses.calls for each in seen])
        checks[NORMS] = norms_stay_replicas(seen)
    for name, check in checks.items():
        try:
            for each in check:
                own.append(PreflightFinding(*each))
            judged.append(name)
        except NotJudged as reason:
            skipped[name] = str(reason)
    if any(each.has_closures for each in seen):
        # The simulator reads gradients when a step begins, before its function computes them.
        found = [each for each in found if each.rule != "gradients-kept"]
    first = next(iter(reports.values()), PreflightReport(0, 0, 0, (), ()))
    return PreflightReport(
        min((report.steps for report in reports.values()), default=0),
        first.models or max(len(each.roots) for each in seen),
        first.parameters or max(map(count_parameters, seen)),
        (
            *without_same_cause(found, own),
            *(each for each in own if each.severity != "info"),
        ),
        tuple(judged),
        skipped,
        first.dtypes,
        len(seen),
        (
            *(each for each in own if each.severity == "info"),
            *merge_ranks({rank: report.notes for rank, report in reports.items()}),
        ),
    )


def count_parameters(seen: Observer) -> int:
    """Return the number of parameters of the models that a rank has called."""
    return len({id(p) for model, _ in seen.roots.values() for p in model.parameters()})


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
        votes = {n: count_votes({r: held[r][n][1] for r in ranks}) for n in names}
        wrong = [name for name, vote in votes.items() if not vote.is_unanimous]
        if wrong:
            yield (
                "norms-differ",
                "error",
                f"{name_some(wrong)} of {len(names)} parameters of norms were equal on ranks {ranks}, which share a "
                f"batch, and differ after {seen[0].steps} steps: {votes[wrong[0]]}",
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


def has_device(kind: str) -> bool:
    """Return whether this machine has a device of a kind."""
    return bool(getattr(getattr(torch, kind, None), "is_available", lambda: False)())


def main(text: str) -> int:
    """Run the script of `sys.argv` as a request in JSON asks for, and write the report.

    Without a number of ranks, the script is one process that names a device: it is served if the machine lacks it.
    """
    request, path = Request.from_json(text), Path(sys.argv[0])
    if (
        request.ranks is None
        and request.device == "auto"
        and has_device(kind_in(path.read_bytes()))
    ):
        return leave(run_trial(request))
    outcome: PreflightReport | ArgumentError
    try:
        outcome = preflight_ranks(
            path,
            sys.argv[1:],
            ranks=1 if request.ranks is None else request.ranks,
            steps=request.steps,
            config=request.config,
            declare=request.declare,
            device=request.device,
        )
    except ArgumentError as error:
        outcome = error
    write_outcome(request.record, outcome)
    return leave(0)
