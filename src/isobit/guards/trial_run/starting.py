"""Run a script under checks in a process of its own, and return its report. Does not load torch."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError

LAST_LINES = 15
# Words of a script that name a device.
DEVICES = re.compile(rb"\bcuda\b|\bnccl\b|\bxpu\b|\bxccl\b|\bnpu\b|\bhccl\b|accelerator=.gpu")
# Run by path: the caller's process needs no torch.
script_program = Path(__file__).with_name("script.py")
ranks_program = Path(__file__).with_name("ranks.py")


@dataclass(frozen=True)
class TrialScript:
    """A training script and how its first steps are run.

    Attributes:
        path: The script.
        arguments: Its arguments.
        steps: Optimizer steps.
        ranks: Simulated ranks; None is one process.
        device: The kind of device that it finds: auto, cuda, xpu, npu or cpu.
        torchrun: Set the variables that torchrun sets for its only rank.
    """

    path: Path
    arguments: Sequence[str] = ()
    steps: int = 3
    ranks: int | None = None
    device: str = "auto"
    torchrun: bool = False


def run_script(
    script: TrialScript, config: dict[str, Any] | None, declare: dict[str, Any] | None
) -> dict[str, Any]:
    """Run the script in a fresh process, with the caller's environment, and return its report.

    Args:
        script: What is run, and how.
        config: The hyperparameters and counts that the run must have.
        declare: What cannot be inferred from the script.

    Raises:
        ArgumentError: If the script fails before its optimizer has stepped.
    """
    with tempfile.TemporaryDirectory() as folder:
        record, written = Path(folder) / "record.json", Path(folder) / "output"
        request = {
            "script": str(script.path),
            "arguments": list(script.arguments),
            "steps": script.steps,
            "ranks": script.ranks,
            "device": script.device,
            "config": config,
            "declare": declare,
            "record": str(record),
        }
        is_simulated = script.ranks is not None or wants_device(script)
        program = ranks_program if is_simulated else script_program
        command = [sys.executable, str(program), json.dumps(request)]
        if script.torchrun:
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
                received=f"exit code {done.returncode} of {script.path}"
                + ("" if not lines else ", after:\n" + "\n".join(lines)),
                remedy="run it with python first; --torchrun for one that needs torchrun's variables, and "
                "--ranks N for several; arguments after -- are passed to the script",
            )
        report: dict[str, Any] = json.loads(record.read_text())
    if "error" in report:
        raise ArgumentError(**report["error"])
    return report


def wants_device(script: TrialScript) -> bool:
    """Return whether a script of one process asks for a device that this machine may lack; its process looks.

    A script that asks whether a device is there runs without one, and so do trainers that choose by themselves.
    """
    source = script.path.read_bytes()
    if script.device != "auto":
        return script.device != "cpu"
    return DEVICES.search(source) is not None and b"is_available" not in source


def rank_variables() -> list[str]:
    """Return the variables of the only rank of a torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [f"{name}=0" for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    sizes = [f"{name}=1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    return [*ranks, *sizes, "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={port}"]
