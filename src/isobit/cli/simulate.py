"""`isobit simulate`: run a torchrun script on many ranks in one process under many schedules."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from isobit.cli.arguments import add_engine, at_least_one, check_script
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError, SimulationError
from isobit.foundation import files
from isobit.foundation.engines import check_engine
from isobit.foundation.majority import name_ranks
from isobit.foundation.records import to_json
from isobit.simulator.page import write_simulate_page

if TYPE_CHECKING:
    from isobit.simulator.sweep import Group, SeedRun


# Listed here because their own modules load torch; tests compare.
FAULTS = {kind.lower(): kind for kind in ("Die", "Stall", "Straggle", "Drop", "Flip", "PlantNaN")}
WATCHES = ("bits", "reads", "training", "devices")
TRAINING = (
    "buffers differ",
    "data alike",
    "differs from one worker",
    "dropout on",
    "file shared",
    "gradients differ",
    "gradients kept",
    "not updated",
    "order repeated",
    "random numbers alike",
    "start differs",
    "tensors alike",
    "update differs",
    "weights differ",
)
FINDINGS = tuple(
    sorted({*TRAINING, *(error.kind for error in SimulationError.__subclasses__())} - {"fault"})
)


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        description="Run a script as torchrun would, with every rank in this process, once per seed: each seed "
        "selects a different schedule and different delays. Find deadlocks, mismatched collectives, orphaned work and "
        "messages, reads of pending results, flipped bits, and training in which replicas differ. Exit 0: nothing "
        "found; 1: findings; 2: could not run.",
        epilog="arguments after -- are passed to the script: isobit simulate train.py --ranks 8 -- --lr 0.1",
    )
    parser.add_argument(
        "script", type=Path, help="a script that calls init_process_group; it is run"
    )
    add_schedule_options(parser)
    add_check_options(parser)
    add_recorder_option(parser)
    add_engine(parser)
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        default=1,
        metavar="N",
        help="number of local processes that run seeds (default: %(default)s)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of tables")
    add_quiet(parser)


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how many ranks and schedules, and which faults."""
    parser.add_argument("--ranks", type=at_least_one, default=4, help="default: %(default)s")
    parser.add_argument(
        "--seeds",
        type=at_least_one,
        default=10,
        help="schedules to try, from seed 0 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="run this seed only, to replay a finding")
    parser.add_argument(
        "--faults",
        type=fault_kinds,
        default=(),
        metavar="K,K…",
        help=f"plant one per seed, out of {', '.join(FAULTS)}",
    )
    parser.add_argument(
        "--fault-calls",
        type=int,
        default=20,
        help="plant it at one of a rank's first N calls (default: 20)",
    )
    parser.add_argument(
        "--sends",
        choices=("buffered", "rendezvous"),
        default="buffered",
        help="sends like gloo's, or like NCCL's",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "xpu", "npu", "cpu"),
        default="auto",
        help="which kind of device the script finds, one per rank, served by the CPU (default: the kind that it names)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120.0,
        help="real seconds of one rank's turn, after which it is reported as not returning (default: %(default)s)",
    )
    parser.add_argument(
        "--lines",
        type=at_least_one,
        metavar="N",
        help="lines of the program in one rank's turn, after which it is reported the same way (default: any number)",
    )


def add_recorder_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to write what torch's flight recorder would."""
    parser.add_argument(
        "--flight-recorder",
        type=Path,
        metavar="DIR",
        help="write each rank's calls to DIR as torch's flight recorder does, for isobit autopsy; with several seeds "
        "to DIR/seed-N",
    )


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is checked and reported."""
    parser.add_argument(
        "--watch",
        type=watches,
        default=WATCHES,
        metavar="W,W…",
        help=f"checks (default: {','.join(WATCHES)}; none for no checks)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        choices=FINDINGS,
        metavar="KIND",
        help=f"a kind of finding to ignore: {', '.join(FINDINGS)}",
    )
    parser.add_argument(
        "--one-worker",
        action="store_true",
        help="compare each step with one rank of the same script",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="tolerance of that comparison (default: %(default)s)",
    )


def fault_kinds(text: str) -> tuple[str, ...]:
    """Parse `die,drop`."""
    words = text.lower().split(",")
    if not set(words) <= set(FAULTS):
        raise argparse.ArgumentTypeError(
            f"expected names out of {', '.join(FAULTS)}; received {text!r}"
        )
    return tuple(FAULTS[word] for word in words)


def watches(text: str) -> tuple[str, ...]:
    """Parse `bits,training`."""
    words = () if text == "none" else tuple(text.split(","))
    if not set(words) <= {*WATCHES, "finite"}:
        raise argparse.ArgumentTypeError(
            f"expected names out of {', '.join(WATCHES)}, finite; received {text!r}"
        )
    return words


def run(options: argparse.Namespace) -> int:
    """Run every seed and print the findings."""
    from isobit.simulator.program.script import Script
    from isobit.simulator.sweep import Plan, compare_prints, group_findings, run_seeds

    if options.one_worker and "training" not in options.watch:
        raise ArgumentError(
            expected="--one-worker with training watched",
            received=f"--watch {','.join(options.watch) or 'none'}",
            remedy="add training to --watch, or leave --watch out",
        )
    check_engine(options.on)
    check_script(options.script)
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
        for finished in run_seeds(plan, options.on, options.jobs):
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
                remedy=found.remedy
                or "run it with python first; arguments after -- are passed to the script",
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
    from isobit.simulator.sweep import merge_not_judged

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
    from isobit.simulator.sweep import merge_not_judged

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
