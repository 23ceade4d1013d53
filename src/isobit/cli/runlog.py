"""`isobit runlog`: judge the logs of training runs. Does not load torch."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.config_file import read_config
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.contracts.language.load import load_contract
from isobit.contracts.store.tree import library
from isobit.errors import ArgumentError
from isobit.files import write_text
from isobit.guards.run_log.curves import RunLog
from isobit.guards.run_log.findings import Limits, Verdict
from isobit.guards.run_log.readers import read_log
from isobit.guards.run_log.rules import judge_log
from isobit.guards.run_log.schedule import schedule_in
from isobit.plain_text import one_line
from isobit.report.preflight_page import many
from isobit.report.run_picture import draw_run


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "runlog",
        help="judge the log of a training run: NaN, rising loss, spikes, norms, missing steps, learning rates",
        description="Read the log of a run (JSON lines, CSV, transformers' trainer_state.json, events of "
        "isobit.guards.watch or of TensorBoard, a run of MLflow) and report numbers that are not finite, losses that "
        "hide such numbers, a loss whose exponential mean over 100 steps rises by more than 5 % over 500 steps "
        "(FALSIFY-ALBOR-001), gradient norms above the limit (FALSIFY-ALBOR-002), spikes, plateaus, missing steps, and "
        "learning rates other than the configuration's. No tracker's package is needed. "
        "Exit 0: nothing found; 1: findings; 2: could not read.",
        epilog="example: isobit runlog out/trainer_state.json --svg run.svg",
    )
    parser.add_argument(
        "logs",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="a file, a folder of TensorBoard's event files, or mlruns or mlflow.db; each is judged by itself",
    )
    parser.add_argument(
        "--run",
        default="",
        metavar="ID",
        help="which run of MLflow, by id or name, if there are several",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with learning_rate, lr_scheduler_type (constant, linear, cosine), warmup_steps, max_steps: "
        "what the learning rates must be (MLflow: by default the run's parameters)",
    )
    parser.add_argument(
        "--warmup",
        type=whole,
        default=Limits.warmup,
        metavar="STEPS",
        help="steps that are not judged for a rising loss (default: %(default)s)",
    )
    parser.add_argument(
        "--max-norm",
        type=positive,
        default=Limits.max_norm,
        help="limit of the gradient norm after clipping (default: %(default)s)",
    )
    parser.add_argument(
        "--norms",
        choices=("auto", "clipped", "unclipped"),
        default="auto",
        help="whether norms were logged after or before clipping (auto: before, in a trainer_state.json)",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the curves with the findings marked; of one log",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def whole(text: str) -> int:
    """Parse a number of steps."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, received {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, received {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """Judge every log and print what was found. The exit code is 0 if nothing counts against a run."""
    if options.svg is not None and len(options.logs) > 1:
        raise ArgumentError(
            expected="one log with --svg",
            received=f"{len(options.logs)} logs",
            remedy="draw them one at a time",
        )
    config = None if options.config is None else read_config(options.config)
    limits = Limits(options.warmup, options.max_norm, options.norms, config)
    logs = [read_log(path, options.run) for path in options.logs]
    judged = [(log, with_causes(judge_log(log, limits))) for log in logs]
    origin = provenance_of(options, [log.digest() for log in logs])
    if options.svg is not None:
        write_text(options.svg, picture(*judged[0], origin, config))
    if options.json:
        say_json({"provenance": origin, "logs": [as_record(*each) for each in judged]})
    else:
        console = make_console(140, soft_wrap=True)
        for each in judged:
            show(console, *each)
    return 0 if all(verdict.is_kept for _, verdict in judged) else 1


def with_causes(verdict: Verdict) -> Verdict:
    """Add the likely causes that the contract training-stability-v1 has for its claims."""
    if not any(finding.claim for finding in verdict.findings):
        return verdict
    contract = load_contract(library() / "training_stability" / "contract.yaml")
    known = {claim.id: claim.if_fails for claim in contract.claims}
    found = [
        replace(finding, causes=known[finding.claim]) if finding.claim else finding
        for finding in verdict.findings
    ]
    return replace(verdict, findings=tuple(found))


def picture(log: RunLog, verdict: Verdict, origin: Any, config: Any = None) -> str:
    """Return the picture of a log, with the learning rates of the configuration if the log has others."""
    marks = [(f.step, f"{f.rule}: {f.message}", f.severity != "info") for f in verdict.findings]
    title, _, about = sentence(log, verdict).partition("; ")
    wanted = {}
    if any(finding.rule == "schedule" for finding in verdict.findings):
        schedule = schedule_in(config if config is not None else log.config or {}, log.max_steps)
        wanted["lr"] = [(step, schedule.rate(step)) for step, _ in log.curves["lr"]]
    return draw_run(title, about, log.curves, marks, origin, wanted)


def as_record(log: RunLog, verdict: Verdict) -> dict[str, Any]:
    """Return a log and its verdict for JSON; the curves stay in the log."""
    return {
        "path": log.path,
        "form": log.form,
        "rows": log.rows,
        "skipped": log.skipped,
        "unreadable": log.unreadable,
        "cut": log.cut,
        "unused": dict(log.unused),
        "worded": log.worded,
        "replaced": log.replaced,
        "resumed": log.resumed,
        "entries": {name: len(points) for name, points in log.curves.items()},
        "kept": verdict.is_kept,
        **asdict(verdict),
    }


def show(console: Console, log: RunLog, verdict: Verdict) -> None:
    """Print the findings with their likely causes, what was not judged, and the sentence."""
    if verdict.findings:
        table = Table("step", "rule", "severity", "found", "likely causes")
        for finding in verdict.findings:
            table.add_row(
                str(finding.step),
                one_line(finding.rule),
                finding.severity,
                one_line(finding.message),
                one_line(finding.causes),
            )
        console.print(table)
    for rule, reason in verdict.not_judged.items():
        console.print(f"not judged: {rule}: {reason}")
    console.print(one_line(sentence(log, verdict)))


def sentence(log: RunLog, verdict: Verdict) -> str:
    """Return the verdict with its denominators."""
    steps = [step for step, _ in log.curves["loss"]]
    entries = ", ".join(f"{len(points):,} of {name}" for name, points in log.curves.items())
    counts = sum(finding.severity != "info" for finding in verdict.findings)
    every = len(verdict.judged) + len(verdict.not_judged)
    return (
        f"{Path(log.path).name} ({log.form}): {'kept' if verdict.is_kept else 'BROKEN'}: "
        f"{many(counts, 'finding')}; "
        f"{len(verdict.judged)} of {every} rules judged over {entries}, steps {min(steps)}–{max(steps)}"
        + (f"; {log.skipped:,} of {log.rows:,} entries have none of these" if log.skipped else "")
        + "".join(f"; {count:,} of {name} not used" for name, count in log.unused.items())
        + (f"; {log.worded:,} numbers are null or words, and not finite" if log.worded else "")
        + (
            f"; {log.replaced:,} entries were logged again, and the later ones count"
            if log.replaced
            else ""
        )
    )
