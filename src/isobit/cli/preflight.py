"""`isobit preflight`: run the first steps of a training script under checks, in a process of its own."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from isobit.cli import preflight_config
from isobit.cli.config_file import read_config
from isobit.cli.options.simulate import at_least_one
from isobit.cli.preflight_output import show_report
from isobit.cli.provenance import provenance_of
from isobit.cli.script_file import check_script
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.foundation import files
from isobit.foundation.plain_text import one_line
from isobit.guards import trial_run
from isobit.guards.configured_steps import plan_of
from isobit.guards.trial_run.page import write_preflight_page

LAST_LINES = 15
COUNTS = {  # which a configuration may lack
    "--sequences": "training sequences, if neither the configuration nor a data loader says",
    "--tokens": "tokens of the training data, instead of --sequences",
    "--sequence-length": "tokens per sequence, if the configuration does not say",
    "--parameters": "parameters of the model; then there must be ten tokens for each",
}
STEPS = "configured steps suffice"  # as in isobit.guards.trial_run.run, which loads torch
# Words of a script that name a device.
DEVICES = re.compile(rb"\bcuda\b|\bnccl\b|\bxpu\b|\bxccl\b|\bnpu\b|\bhccl\b|accelerator=.gpu")
# Run by path: the caller's process needs no torch.
script_program = Path(trial_run.__file__).with_name("script.py")
ranks_program = Path(trial_run.__file__).with_name("ranks.py")


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        help="run the first steps of a training script and report what is wrong with them",
        description="Run a script until its optimizer has stepped three times, and report: parameters that are in no "
        "optimizer, get no gradient or do not move, frozen ones that do; gradients that are not cleared; numbers that "
        "are not finite; a loss that is averaged per micro-batch; equal batches, workers and epochs; a model that in "
        "eval mode is random or mixes samples, or is trained in it; autocast without effect; a checkpoint that reads "
        "back differently; hyperparameters and counts that differ from a configuration. Of a configuration: steps that "
        "its data does not have, a warm-up that does not end, too few tokens. Exit 0: nothing found; 1: findings; 2: "
        "could not run, nothing was seen, or the steps of a configuration could not be judged.",
        epilog="words after -- go to the script: isobit preflight train.py --config train.yaml -- --lr 0.1",
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
        help="YAML with what only you know: frozen (patterns of names), tied (groups of names), hyperparameters, "
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
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Run the script, or judge the configuration, and print what was found. The exit code is 0 if nothing was."""
    check_script(options.script)
    if options.script.suffix.lower() in preflight_config.SUFFIXES:
        return preflight_config.run(options)
    config = None if options.config is None else read_config(options.config)
    given = preflight_config.given_counts(options)
    if given.keys() - {"ranks"}:
        config = {**(config or {}), **{k: v for k, v in given.items() if k != "ranks"}}
    declare = None if options.declare is None else read_config(options.declare, "--declare")
    report = run_script(options, config, declare)
    origin = provenance_of(options, [options.script.read_text(errors="replace")])
    if options.html:
        files.write_text(options.html, write_preflight_page(options.script.name, report, origin))
    if options.json:
        say_json({"provenance": origin, "clean": not report["findings"], **report})
    else:
        show_report(make_console(130, soft_wrap=True), options.script.name, report)
    if report["findings"]:
        return 1
    return refuse_unjudged(config, report)


def refuse_unjudged(config: dict[str, Any] | None, report: dict[str, Any]) -> int:
    """Return 0; or 2, with the reason, if the configuration has steps that could not be judged."""
    reason = report["not_judged"].get(STEPS)
    if config is None or reason is None or not plan_of(config).has_steps:
        return 0
    sys.stderr.write(
        f"isobit preflight: the steps of the configuration could not be judged: {one_line(reason)}\n"
    )
    return 2


def run_script(
    options: argparse.Namespace, config: dict[str, Any] | None, declare: dict[str, Any] | None
) -> dict[str, Any]:
    """Run the script in a fresh process, with the caller's environment, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        record, written = Path(folder) / "record.json", Path(folder) / "output"
        orders = {
            "script": str(options.script),
            "arguments": options.passed_on,
            "steps": options.steps,
            "ranks": options.ranks,
            "device": options.device,
            "config": config,
            "declare": declare,
            "record": str(record),
        }
        is_simulated = options.ranks is not None or wants_device(options)
        program = ranks_program if is_simulated else script_program
        command = [sys.executable, str(program), json.dumps(orders)]
        if options.torchrun:
            command = ["env", *rank_variables(), *command]
        with open(written, "wb") as output:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode or not record.exists():
            lines = written.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise ArgumentError(
                expected="a script that runs up to its optimizer's steps",
                received=f"exit code {done.returncode} of {options.script}"
                + ("" if not lines else ", after:\n" + "\n".join(lines)),
                remedy="run it with python first; --torchrun for one that needs torchrun's variables, and "
                "--ranks N for several; words after -- go to the script",
            )
        report: dict[str, Any] = json.loads(record.read_text())
    if "error" in report:
        raise ArgumentError(**report["error"])
    return report


def wants_device(options: argparse.Namespace) -> bool:
    """Return whether a script of one process asks for a device that this machine may lack; its process looks.

    A script that asks whether a device is there runs without one, and so do trainers that choose by themselves.
    """
    source = options.script.read_bytes()
    if options.device != "auto":
        return bool(options.device != "cpu")
    return DEVICES.search(source) is not None and b"is_available" not in source


def rank_variables() -> list[str]:
    """Return the variables of the only rank of a torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [f"{name}=0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    sizes = [f"{name}=1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    return [*ranks, *sizes, "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]
