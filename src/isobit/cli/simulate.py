"""`isobit simulate`: a torchrun script on many ranks in one process, under many schedules, with the culprit named."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.progress import make_progress
from isobit.errors import ArgumentError
from isobit.records import to_json
from isobit.simulator.checkers import listed
from isobit.simulator.faults import KINDS
from isobit.simulator.script import Script
from isobit.simulator.sweep import WATCHES, Group, Plan, SeedRun, compare_prints, group_findings, run_seeds

FAULTS = {kind.lower(): kind for kind in KINDS}


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="run a torchrun script on simulated ranks, under many schedules, and name what is wrong",
        description="Runs a script as torchrun would, with every rank in this process, once per seed: each seed is "
        "another schedule and other delays. Finds deadlocks, mismatched collectives, orphaned work and messages, reads "
        "of pending results, flipped bits, and training in which replicas part. Exit 0: nothing found; 1: findings; "
        "2: could not run.",
        epilog="words after -- go to the script: isobit simulate train.py --ranks 8 -- --lr 0.1",
    )
    parser.add_argument("script", type=Path, help="a script that calls init_process_group; it is run")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=10, help="schedules to try, from seed 0 (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone: to replay a finding")
    parser.add_argument(
        "--faults", type=fault_kinds, default=(), metavar="K,K…", help=f"plant one per seed, out of {', '.join(FAULTS)}"
    )
    parser.add_argument(
        "--fault-calls", type=int, default=20, help="at one of a rank's first so many calls (default: 20)"
    )
    parser.add_argument(
        "--sends", choices=("buffered", "rendezvous"), default="buffered", help="as gloo's, or as NCCL's"
    )
    parser.add_argument(
        "--watch", type=watches, default=WATCHES, metavar="W,W…", help=f"default: {','.join(WATCHES)}; none: nothing"
    )
    parser.add_argument("--ignore", action="append", default=[], metavar="KIND", help="a kind of finding to leave out")
    parser.add_argument("--one-worker", action="store_true", help="compare each step with one rank of the same script")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of that comparison (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="real seconds of one rank's turn (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    parser.set_defaults(run=run)


def fault_kinds(text: str) -> tuple[str, ...]:
    """die,drop"""
    words = text.lower().split(",")
    if not set(words) <= set(FAULTS):
        raise argparse.ArgumentTypeError(f"expected names out of {', '.join(FAULTS)}; received {text!r}")
    return tuple(FAULTS[word] for word in words)


def watches(text: str) -> tuple[str, ...]:
    """bits,training"""
    words = () if text == "none" else tuple(text.split(","))
    if not set(words) <= {*WATCHES, "finite"}:
        raise argparse.ArgumentTypeError(f"expected names out of {', '.join(WATCHES)}, finite; received {text!r}")
    return words


def run(options: argparse.Namespace) -> int:
    """Runs every seed, prints what came of them."""
    for wrong, expected, received in (
        (options.ranks < 1 or options.seeds < 1, "a rank and a seed at least", f"{options.ranks}, {options.seeds}"),
        (options.one_worker and "training" not in options.watch, "--one-worker with training watched", "none watched"),
    ):
        if wrong:
            raise ArgumentError(expected=expected, received=received, remedy="isobit simulate --help")
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
    )
    runs: list[SeedRun] = []
    with make_progress() as progress:
        task = progress.add_task(f"{options.script.name} on {options.ranks} ranks", total=len(plan.seeds))
        for finished in run_seeds(plan):
            refuse_unstarted(options, finished)
            runs.append(finished)
            found = sum(bool(run.found) for run in runs)
            progress.update(task, advance=1, description=f"{options.script.name}: {found} seeds with findings")
    groups, departs = group_findings(runs), compare_prints(runs)
    if options.json:
        print(to_json(as_record(options, runs, groups, departs)))
    else:
        show(Console(highlight=False, width=118, soft_wrap=True), options, runs, groups, departs)
    return 1 if groups else 0


def refuse_unstarted(options: argparse.Namespace, run: SeedRun) -> None:
    """A script that fails on every rank before any call could not be run: an import, or an argument, is missing."""
    for found in run.found:
        if not run.calls and len(found.ranks) == options.ranks and found.cause:
            raise ArgumentError(
                expected="a script that reaches a call of torch.distributed",
                received=f"{found.cause} on every rank" + (f", after {found.wrote!r}" if found.wrote else ""),
                remedy=found.remedy or "run it with python first; words after -- go to the script",
            )


def as_record(options: argparse.Namespace, runs: list[SeedRun], groups: list[Group], departs: str) -> dict[str, Any]:
    """For machines."""
    return {
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
        "prints_agree": not departs,
        "prints_depart": departs,
        "printed": list(runs[0].printed),
        "traces": {str(run.seed): run.digest for run in runs},
        "faults": {str(run.seed): list(run.faults) for run in runs if run.faults},
    }


def replay_command(options: argparse.Namespace, group: Group) -> str:
    """The command that shows a finding again."""
    words = ["isobit", "simulate", str(options.script), "--ranks", str(options.ranks), "--seed", str(group.seeds[0])]
    if options.faults:
        words += ["--faults", ",".join(kind.lower() for kind in options.faults)]
        words += ["--fault-calls", str(options.fault_calls)]
    if options.sends != "buffered":
        words += ["--sends", options.sends]
    if tuple(options.watch) != WATCHES:
        words += ["--watch", ",".join(options.watch) or "none"]
    for kind in options.ignore:
        words += ["--ignore", kind]
    if options.one_worker:
        words += ["--one-worker", "--tolerance", str(options.tolerance)]
    return shlex.join([*words, *(["--", *options.passed_on] if options.passed_on else [])])


def show(console: Console, options: argparse.Namespace, runs: list[SeedRun], groups: list[Group], departs: str) -> None:
    """For people: what rank 0 printed, each kind of finding with its culprits, and where each rank stood."""
    if runs[0].printed[0]:
        console.print(f"rank 0 printed, with seed {runs[0].seed}:", style="dim")
        console.print(runs[0].printed[0].rstrip(), markup=False)
    if groups:
        table = Table("found", "culprits", "seeds", "first seed")
        for group in groups:
            table.add_row(group.kind, listed(group.ranks), f"{len(group.seeds)} of {len(runs)}", str(group.seeds[0]))
        console.print(table)
    for group in groups:
        console.print(f"{group.kind}: {group.first.text}", markup=False)
        places: dict[tuple[str, ...], list[int]] = {}
        for rank, lines in sorted(group.first.stacks.items()):
            places.setdefault(tuple(lines[:4]), []).append(rank)
        for place, ranks in places.items():
            console.print(f"  {listed(ranks)}: " + " ← ".join(place), markup=False)
        if group.first.wrote:
            console.print(f"  wrote: {group.first.wrote}", markup=False)
        console.print(f"  again: {replay_command(options, group)}", markup=False)
    if not runs[0].calls:
        console.print("no rank made a call of torch.distributed: nothing was tried")
    clean = sum(not run.found for run in runs)
    console.print(f"{len(runs)} seeds, {options.ranks} ranks: {clean} clean, {len(runs) - clean} with findings")
    if clean > 1:
        console.print(f"prints part: {departs}" if departs else f"prints agree over {clean} clean seeds", markup=False)
