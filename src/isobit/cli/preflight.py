"""`isobit preflight`: run the first steps of a training script under checks, in a process of its own."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from isobit.cli.options.simulate import at_least_one
from isobit.cli.provenance import provenance_of
from isobit.cli.script_file import check_script
from isobit.cli.terminal import make_console, say_json
from isobit.errors import ArgumentError
from isobit.files import read_bytes
from isobit.guards.trial_run import script as script_program
from isobit.plain_text import one_line

LAST_LINES = 15
LARGEST = 2**24  # bytes of a configuration


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        help="run the first steps of a training script and report what is wrong with them",
        description="Run a script until its optimizer has stepped three times, and report: parameters that are in no "
        "optimizer, get no gradient or do not move, frozen ones that do; gradients that are not cleared; numbers that "
        "are not finite; equal batches; a model that is random in eval mode; hyperparameters of a configuration that "
        "did not reach the optimizer. Exit 0: nothing found; 1: findings; 2: could not run.",
        epilog="words after -- go to the script: isobit preflight train.py --config train.yaml -- --lr 0.1",
    )
    parser.add_argument("script", type=Path, help="a script that trains; it is run")
    parser.add_argument(
        "--steps", type=at_least_one, default=3, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with the lr, betas, eps, weight_decay, momentum and max_grad_norm of the run",
    )
    parser.add_argument(
        "--torchrun",
        action="store_true",
        help="set RANK, WORLD_SIZE and the rest as torchrun does for its only rank",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record instead of text")


def run(options: argparse.Namespace) -> int:
    """Run the script and print what was found. The exit code is 0 if nothing was."""
    check_script(options.script)
    report = run_script(options, read_config(options.config))
    if options.json:
        origin = provenance_of(options, [options.script.read_text(errors="replace")])
        say_json({"provenance": origin, "clean": not report["findings"], **report})
    else:
        show(make_console(130, soft_wrap=True), options.script.name, report)
    return 1 if report["findings"] else 0


def read_config(path: Path | None) -> dict[str, Any] | None:
    """Read a configuration; JSON is YAML too."""
    if path is None:
        return None
    try:
        found = yaml.safe_load(read_bytes(path, LARGEST).decode())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentError(
            expected="a configuration in YAML or JSON",
            received=f"{path}: {one_line(str(error))}",
            remedy="correct the file, or leave --config out",
        ) from error
    if not isinstance(found, Mapping):
        raise ArgumentError(
            expected="a configuration with names and values",
            received=f"{path}: {type(found).__name__}",
            remedy="write one name per line, such as lr: 1e-4",
        )
    return json.loads(json.dumps(found, default=str)) if found else {}


def run_script(options: argparse.Namespace, config: dict[str, Any] | None) -> dict[str, Any]:
    """Run the script in a fresh process, with the caller's environment, and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        record, written = Path(folder) / "record.json", Path(folder) / "output"
        orders = {
            "script": str(options.script),
            "arguments": options.passed_on,
            "steps": options.steps,
            "config": config,
            "record": str(record),
        }
        command = [sys.executable, str(Path(script_program.__file__)), json.dumps(orders)]
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
                "isobit simulate for several ranks; words after -- go to the script",
            )
        report: dict[str, Any] = json.loads(record.read_text())
    if "error" in report:
        raise ArgumentError(**report["error"])
    return report


def rank_variables() -> list[str]:
    """Return the variables of the only rank of a torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [f"{name}=0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    sizes = [f"{name}=1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    return [*ranks, *sizes, "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]


def show(console: Console, name: str, report: dict[str, Any]) -> None:
    """Print the findings, what was not judged, and the sentence with its denominators."""
    if report["findings"]:
        table = Table("rule", "severity", "step", "found")
        for found in report["findings"]:
            step = "" if found["step"] is None else str(found["step"])
            words = f"{found['module']}: " if found["module"] else ""
            table.add_row(
                found["rule"], found["severity"], step, one_line(words + found["message"])
            )
        console.print(table)
    for check, reason in report["not_judged"].items():
        console.print(one_line(f"not judged: {check}: {reason}"))
    judged, every = len(report["judged"]), len(report["judged"]) + len(report["not_judged"])
    console.print(
        f"{one_line(name)}: {'clean' if not report['findings'] else 'FOUND'}: {len(report['findings'])} findings; "
        f"{judged} of {every} checks made, on {report['steps']} steps, {report['models']} models and "
        f"{report['parameters']} parameters"
    )
