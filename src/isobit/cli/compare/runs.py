"""`isobit compare runs`: run a training script twice and name the first difference and its cause."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.arguments import at_least_one, check_script
from isobit.cli.progress import SELDOM, Steps, add_quiet
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.comparing.runs.report import Cause, Report, write_twice_page
from isobit.comparing.runs.run import run_twice
from isobit.foundation import files
from isobit.foundation.plain_text import one_line
from isobit.foundation.records import to_json
from isobit.guards.trial_run.starting import TrialScript, wants_device

WORDS = {True: "YES", False: "no", None: "not known"}


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "runs",
        description="Run a script twice in fresh processes (FALSIFY-ALBOR-003), with the same interpreter, environment "
        "and arguments, and compare every operator's results, losses, gradients, parameters and optimizer state, bit "
        "for bit. If they differ, name step, tensor and operator, and run the script again with one suspect fixed at a "
        "time (seeds, PYTHONHASHSEED, clocks, threads). Exit 0: equal; 1: the runs differ; 2: could not run.",
        epilog="arguments after -- are passed to the script: isobit compare runs train.py --steps 10 -- --lr 0.1",
    )
    parser.add_argument("script", type=Path, help="a script that trains; it is run")
    parser.add_argument(
        "--steps",
        type=at_least_one,
        default=5,
        help="optimizer steps after which each run ends (default: %(default)s)",
    )
    parser.add_argument(
        "--causes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the script again to find the cause",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "xpu", "npu", "cpu"),
        default="auto",
        help="which kind of device the script finds, served by the CPU, with torchrun's variables for one rank "
        "(default: the kind that it names, if this machine lacks it and the script does not ask whether it is there)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML report that needs nothing else"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the script twice and print what differs. The exit code is 0 if nothing does."""
    check_script(options.script)
    is_served = wants_device(TrialScript(options.script, device=options.device))
    with Steps(options.script.name, options.steps, options.quiet, SELDOM) as steps:

        def tell(what: str, done: int) -> None:
            steps.at(f"{options.script.name}, {what}", done, options.steps)

        report = run_twice(
            options.script,
            options.passed_on,
            steps=options.steps,
            causes=options.causes,
            device=options.device if is_served else "cpu",
            progress=tell,
        )
    record = as_record(options, report)
    if options.html:
        plain = json.loads(to_json(record))
        files.write_text(
            options.html, write_twice_page(plain, sentence(report), record["provenance"])
        )
    if options.json:
        say_json(record)
    else:
        show(make_console(140, soft_wrap=True), report)
    return report.exit_code


def as_record(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Return the report for JSON, without the hashes of variables."""
    found = replace(report.comparison, evidence=({}, {}))
    return {
        "provenance": provenance_of(options, [options.script.read_text(errors="replace")]),
        "equal": report.comparison.equal,
        **asdict(replace(report, comparison=found)),
    }


def show(console: Console, report: Report) -> None:
    """Print the first difference, where it comes from, the causes, and what was compared."""
    found = report.comparison
    if found.changed is not None:
        console.print(
            f"first difference: step {found.changed.step}, {one_line(str(found.changed))}"
        )
    if found.origin is not None:
        origin = found.origin
        console.print(f"it comes from:    {one_line(str(origin.call))}, call {origin.call.number}")
        console.print(f"because of:       {origin.why}: {one_line(origin.detail)}")
    elif found.changed is not None:
        console.print("it comes from:    no operator: memory was changed outside of torch")
    if report.causes:
        table = Table("cause", "applies", "shown by")
        for cause in sorted(report.causes, key=rank):
            table.add_row(cause.name, WORDS[cause.applies], one_line(cause.shown_by))
        console.print(table)
    for origin in found.harmless:
        console.print(f"differs without effect so far: {one_line(str(origin.call))}: {origin.why}")
    console.print(sentence(report))


def rank(cause: Cause) -> int:
    """Return the place of a cause in the table: those that apply come first."""
    return {True: 0, None: 1, False: 2}[cause.applies]


def sentence(report: Report) -> str:
    """Return the verdict with its denominators."""
    found = report.comparison
    steps = (
        f"{found.steps[0]}"
        if found.steps[0] == found.steps[1]
        else f"{found.steps[0]} and {found.steps[1]}"
    )
    share = (
        "" if found.recording is None else f", {found.recording:.0%} of their time for recording"
    )
    served = f"; the CPU served the {report.served} device" if report.served else ""
    return (
        f"{'equal' if found.equal else 'DIFFER'}: {steps} steps, {found.operators:,} operator calls and "
        f"{found.tensors:,} tensors of the training's state compared up to the first difference; "
        f"{report.runs} runs, {report.seconds:.1f} s{share}{served}"
    )
