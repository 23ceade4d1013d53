"""`isobit simulate`: run a torchrun script on many ranks in one process under many schedules."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.options.simulate import WATCHES
from isobit.cli.progress import SELDOM, Steps
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.majority import name_ranks
from isobit.foundation.records import to_json
from isobit.simulator.page import write_simulate_page
from isobit.simulator.program.script import Script
from isobit.simulator.sweep import (
    Group,
    Plan,
    SeedRun,
    compare_prints,
    group_findings,
    merge_not_judged,
    run_seeds,
)


def run(options: argparse.Namespace) -> int:
    """Run every seed and print the findings."""
    if options.one_worker and "training" not in options.watch:
        raise ArgumentError(
            expected="--one-worker with training watched",
            received=f"--watch {','.join(options.watch) or 'none'}",
            remedy="add training to --watch, or leave --watch out",
        )
    if not options.script.is_file():
        raise ArgumentError(
            expected="a Python script",
            received=f"no such file: {options.script}",
            remedy="name a script by its path; words after -- go to the script",
        )
    plan = Plan(
        Script(options.script, options.passed_on),
        options.ranks,
        range(options.seeds) if options.seed is None else [options.seed],
        options.faults,
        options.fault_calls,
        options.watch,
        options.ignore,
        options.sends,
        options.one_worker,
        options.tolerance,
        options.patience,
        options.flight_recorder,
        options.device,
        options.lines,
    )
    runs: list[SeedRun] = []
    title = f"{options.script.name} on {options.ranks} ranks"
    with Steps(title, len(plan.seeds), options.quiet, SELDOM) as steps:
        for finished in run_seeds(plan):
            refuse_unstarted(options, finished)
            runs.append(finished)
            found = sum(bool(run.found) for run in runs)
            steps.done(f"{title}, seed {finished.seed}: {found} seeds with findings")
    refuse_silent(options, runs)
    groups, departs = group_findings(runs), compare_prints(runs)
    record = as_record(options, runs, groups, departs)
    if options.html:
        page = write_simulate_page(json.loads(to_json(record)), record["provenance"])
        files.write_text(options.html, page)
    if options.json:
        say_json(record)
    else:
        show(make_console(118, soft_wrap=True), options, runs, groups, departs)
    return 1 if groups else 0


def refuse_unstarted(options: argparse.Namespace, run: SeedRun) -> None:
    """Raise if the script fails on every rank before any call of torch.distributed, or cannot be simulated."""
    for found in run.found:
        if found.unsupported:
            raise ArgumentError(
                expected="a script whose calls the simulator supports",
                received=f"{found.cause.removeprefix('UnsupportedError: ')}, on {name_ranks(found.ranks)}"
                + "".join(f" at {lines[0]}" for lines in found.stacks.values() if lines),
                remedy=found.remedy,
            )
        if not run.calls and len(found.ranks) == options.ranks and found.cause:
            raise ArgumentError(
                expected="a script that reaches a call of torch.distributed",
                received=f"{found.cause} on every rank"
                + (f", after {found.wrote!r}" if found.wrote else ""),
                remedy=found.remedy or "run it with python first; words after -- go to the script",
            )


def refuse_silent(options: argparse.Namespace, runs: list[SeedRun]) -> None:
    """Raise if no rank communicates: zero comparisons are not a pass."""
    if not any(run.calls or run.found for run in runs):
        raise ArgumentError(
            expected="a script whose ranks communicate through torch.distributed",
            received=f"no collective and no message from any of {options.ranks} ranks, in {len(runs)} seeds: "
            "nothing was tried",
            remedy="name the script that torchrun starts, and let it reach its first collective",
        )


def as_record(
    options: argparse.Namespace, runs: list[SeedRun], groups: list[Group], departs: str
) -> dict[str, Any]:
    """Return the findings for JSON."""
    return {
        "provenance": provenance_of(
            options, [options.script.read_text(errors="replace"), *(r.digest for r in runs)]
        ),
        "script": str(options.script),
        "ranks": options.ranks,
        "seeds": [run.seed for run in runs],
        "clean_seeds": [run.seed for run in runs if not run.found],
        "findings": [
            {
                "kind": group.kind,
                "ranks": sorted(group.ranks),
                "seeds": group.seeds,
                "first": group.first,
                "replay": replay_command(options, group),
            }
            for group in groups
        ],
        "calls": runs[0].calls,
        "not_judged": merge_not_judged(runs),
        "prints_agree": not departs,
        "prints_depart": departs,
        "printed": list(runs[0].printed),
        "traces": {str(run.seed): run.digest for run in runs},
        "faults": {str(run.seed): list(run.faults) for run in runs if run.faults},
    }


def replay_command(options: argparse.Namespace, group: Group) -> str:
    """Return the command that shows a finding again."""
    words = [
        "isobit",
        "simulate",
        str(options.script),
        "--ranks",
        str(options.ranks),
        "--seed",
        str(group.seeds[0]),
    ]
    if options.faults:
        words += ["--faults", ",".join(kind.lower() for kind in options.faults)]
        words += ["--fault-calls", str(options.fault_calls)]
    if options.device != "auto":
        words += ["--device", options.device]
    if options.lines is not None:
        words += ["--lines", str(options.lines)]
    if options.sends != "buffered":
        words += ["--sends", options.sends]
    if tuple(options.watch) != WATCHES:
        words += ["--watch", ",".join(options.watch) or "none"]
    for kind in options.ignore:
        words += ["--ignore", kind]
    if options.one_worker:
        words += ["--one-worker", "--tolerance", str(options.tolerance)]
    return shlex.join([*words, *(["--", *options.passed_on] if options.passed_on else [])])


def show(
    console: Console,
    options: argparse.Namespace,
    runs: list[SeedRun],
    groups: list[Group],
    departs: str,
) -> None:
    """Print what rank 0 printed, and each kind of finding with its ranks and where each rank was."""
    if runs[0].printed[0]:
        console.print(f"rank 0 printed, with seed {runs[0].seed}:", style="dim")
        console.print(runs[0].printed[0].rstrip(), markup=False)
    if groups:
        table = Table("found", "culprits", "seeds", "first seed")
        for group in groups:
            table.add_row(
                group.kind,
                name_ranks(group.ranks),
                f"{len(group.seeds)} of {len(runs)}",
                str(group.seeds[0]),
            )
        console.print(table)
    for group in groups:
        follows = f" (may follow from: {group.first.follows})" if group.first.follows else ""
        console.print(f"{group.kind}{follows}: {group.first.text}", markup=False)
        places: dict[tuple[str, ...], list[int]] = {}
        for rank, lines in sorted(group.first.stacks.items()):
            places.setdefault(tuple(lines[:4]), []).append(rank)
        for place, ranks in places.items():
            console.print(f"  {name_ranks(ranks)}: " + " ← ".join(place), markup=False)
        if group.first.note:
            console.print(f"  note: {group.first.note}", markup=False)
        if group.first.wrote:
            console.print(f"  wrote: {group.first.wrote}", markup=False)
        console.print(f"  again: {replay_command(options, group)}", markup=False)
    clean, skipped = sum(not run.found for run in runs), merge_not_judged(runs)
    console.print(
        f"{len(runs)} seed{'s' * (len(runs) != 1)}, {options.ranks} ranks: {clean} clean, "
        f"{len(runs) - clean} with findings; {len(skipped) or 'no'} checks not judged{':' * bool(skipped)}"
    )
    for name, reason in skipped.items():
        console.print(f"  not judged: {name}: {reason}", markup=False)
    if clean > 1:
        console.print(
            f"prints differ: {departs}" if departs else f"prints agree over {clean} clean seeds",
            markup=False,
        )
