"""`isobit preflight`: run the first steps of a training script under checks, in a process of its own."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.arguments import at_least_one, check_script
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line
from isobit.guards.config_file import read_config
from isobit.guards.configured_steps import judge_plan, plan_of
from isobit.guards.trial_run.counts import as_report, known_counts
from isobit.guards.trial_run.page import write_preflight_page
from isobit.guards.trial_run.report import ConfigurationReport, PreflightReport
from isobit.guards.trial_run.starting import TrialScript, run_script

COUNTS = {  # which a configuration may lack
    "--sequences": "training sequences, if neither the configuration nor a data loader says",
    "--tokens": "tokens of the training data, instead of --sequences",
    "--sequence-length": "tokens per sequence, if the configuration does not say",
    "--parameters": "parameters of the model; then there must be ten tokens for each",
}
STEPS = "configured steps suffice"  # as in isobit.guards.trial_run.run, which loads torch
SUFFIXES = (".yaml", ".yml", ".json", ".toml")  # of a configuration
# Options that give a count which a plan has.
PLANNED = ("sequences", "tokens", "sequence_length", "parameters", "ranks")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        description="Run a script until its optimizer has stepped three times, and report: parameters that are in no "
        "optimizer, get no gradient or do not move, frozen ones that do; gradients that are not cleared; numbers that "
        "are not finite; a loss that is averaged per micro-batch; equal batches, workers and epochs; a model that in "
        "eval mode is random or mixes samples, or is trained in it; autocast without effect; a checkpoint that reads "
        "back differently; hyperparameters and counts that differ from a configuration. Of a configuration: steps that "
        "its data does not have, a warm-up that does not end, too few tokens. Exit 0: nothing found; 1: findings; 2: "
        "could not run, nothing was seen, or the steps of a configuration could not be judged.",
        epilog="arguments after -- are passed to the script: isobit preflight train.py --config train.yaml -- --lr 0.1",
    )
    parser.add_argument(
        "script",
        type=Path,
        help="a script that trains, which is run; or its configuration (.yaml, .yml, .json, .toml), whose steps, "
        "epochs and warm-up are judged without running anything",
    )
    parser.add_argument(
        "--steps", type=at_least_one, default=3, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML, JSON or TOML with the lr, betas, eps, weight_decay, momentum, max_grad_norm, batch sizes and steps "
        "of the run, by the names of transformers, DeepSpeed or torchtitan",
    )
    parser.add_argument(
        "--declare",
        type=Path,
        metavar="FILE",
        help="YAML with what cannot be inferred: frozen (patterns of names), tied (groups of names), hyperparameters, "
        "global_batch_size",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--torchrun",
        action="store_true",
        help="set RANK, WORLD_SIZE and the rest as torchrun does for its only rank",
    )
    where.add_argument(
        "--ranks",
        type=at_least_one,
        metavar="N",
        help="run a script that torchrun starts on N simulated ranks; of a configuration, the ranks that share a batch",
    )
    for option, words in COUNTS.items():
        parser.add_argument(option, type=at_least_one, metavar="N", help=words)
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "xpu", "npu", "cpu"),
        default="auto",
        help="which kind of device the script finds, served by the CPU (default: with --ranks the kind that it names; "
        "otherwise that kind if this machine lacks it and the script does not ask whether it is there)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Run the script, or judge the configuration, and print what was found. The exit code is 0 if nothing was."""
    check_script(options.script)
    if options.script.suffix.lower() in SUFFIXES:
        return run_configuration(options)
    config = None if options.config is None else read_config(options.config)
    given = given_counts(options)
    if given.keys() - {"ranks"}:
        config = {**(config or {}), **{k: v for k, v in given.items() if k != "ranks"}}
    declare = None if options.declare is None else read_config(options.declare, "--declare")
    script = TrialScript(
        options.script,
        options.passed_on,
        options.steps,
        options.ranks,
        options.device,
        options.torchrun,
    )
    report = run_script(script, config, declare)
    write(options, report)
    if report.findings:
        return 1
    return refuse_unjudged(config, report)


def refuse_unjudged(config: dict[str, Any] | None, report: PreflightReport) -> int:
    """Return 0; or 2, with the reason, if the configuration has steps that could not be judged."""
    reason = report.not_judged.get(STEPS)
    if config is None or reason is None or not plan_of(config).has_steps:
        return 0
    sys.stderr.write(
        f"isobit preflight: the steps of the configuration could not be judged: {one_line(reason)}\n"
    )
    return 2


def run_configuration(options: argparse.Namespace) -> int:
    """Judge the configuration and print what is wrong. The exit code is 2 if steps could not be judged.

    Raises:
        ArgumentError: If the file is no configuration, has a count that is none, or none that can be judged.
    """
    for option in ("config", "declare"):
        if getattr(options, option) is not None:
            raise ArgumentError(
                expected="a script, with --config and --declare; or a configuration alone",
                received=f"the configuration {options.script}, with --{option}",
                remedy=f"name the script: isobit preflight train.py --config {options.script}",
            )
    config = read_config(options.script, "the configuration")
    plan = plan_of(config, given_counts(options), is_strict=True)
    judgement = judge_plan(plan)
    lacking = {name: why for name, why in judgement.not_judged.items() if name != "tokens"}
    if lacking and not judgement.findings:
        raise ArgumentError(
            expected="a configuration whose steps can be judged",
            received=f"{options.script.name}: "
            + "; ".join(f"{name} {why}" for name, why in lacking.items())
            + f"; known: {known_counts(plan) or 'nothing'}",
            remedy="give --sequences N, or --tokens N and --sequence-length N; the rest is read from the file",
        )
    report = as_report(plan, judgement)
    write(options, report)
    return 1 if report.findings else 0


def given_counts(options: argparse.Namespace) -> dict[str, int]:
    """Return the counts that options give."""
    given = {count: getattr(options, count) for count in PLANNED}
    return {count: value for count, value in given.items() if value is not None}


def write(options: argparse.Namespace, report: PreflightReport | ConfigurationReport) -> None:
    """Write the HTML report if it was asked for, and print the text or the record."""
    origin = provenance_of(options, [options.script.read_text(errors="replace")])
    if options.html:
        files.write_text(options.html, write_preflight_page(options.script.name, report, origin))
    if options.json:
        say_json({"provenance": origin, "clean": not report.findings, **asdict(report)})
    else:
        show_report(make_console(130, soft_wrap=True), options.script.name, report)


def show_report(console: Console, name: str, report: PreflightReport | ConfigurationReport) -> None:
    """Print the findings, what was not judged, and the sentence with its denominators."""
    if report.findings:
        table = Table("rule", "severity", "step", "found")
        for found in report.findings:
            words = f"{name_ranks(found.ranks)}: " if found.ranks else ""
            words += f"{found.module}: " if found.module else ""
            table.add_row(
                found.rule,
                found.severity,
                found.in_steps,
                one_line(words + found.message),
            )
        console.print(table)
    for note in report.notes:
        console.print(one_line(f"note: {note.message}"))
    for check, reason in report.not_judged.items():
        console.print(one_line(f"not judged: {check}: {reason}"))
    console.print(f"{one_line(name)}: {one_line(report.headline)}")
