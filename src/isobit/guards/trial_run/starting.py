"""Run a script under checks in a process of its own, and return its report. Does not load torch."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.foundation.script_process import command, free_port, last_lines, torchrun_variables
from isobit.guards.trial_run.report import PreflightReport
from isobit.report.record_reader import RecordReader

# Words of a script that name a device.
DEVICES = re.compile(rb"\bcuda\b|\bnccl\b|\bxpu\b|\bxccl\b|\bnpu\b|\bhccl\b|accelerator=.gpu")
# What runs a script: in its process, or on simulated ranks. By name, since they load torch.
IN_PROCESS = "isobit.guards.trial_run.script:main"
ON_RANKS = "isobit.guards.trial_run.ranks:main"


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


@dataclass(frozen=True)
class Request:
    """What the process of a script is asked for.

    Attributes:
        steps: Optimizer steps.
        ranks: Simulated ranks; None is one process.
        device: The kind of device that the script finds.
        config: The hyperparameters and counts that the run must have, as in the user's file.
        declare: What cannot be inferred from the script, likewise.
        record: Where the outcome is written.
    """

    steps: int
    ranks: int | None
    device: str
    config: Mapping[str, Any] | None
    declare: Mapping[str, Any] | None
    record: str

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request that `run_script` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Refusal:
    """The parts of an ArgumentError."""

    expected: str
    received: str
    remedy: str


@dataclass(frozen=True)
class Outcome:
    """What the process of a script leaves: a report, or why there is none."""

    report: PreflightReport | None = None
    error: Refusal | None = None


def write_outcome(record: str, outcome: PreflightReport | ArgumentError) -> None:
    """Write what the process of a script found, or why it found nothing."""
    if isinstance(outcome, PreflightReport):
        written = Outcome(outcome)
    else:
        written = Outcome(error=Refusal(outcome.expected, outcome.received, outcome.remedy))
    Path(record).write_text(json.dumps(asdict(written)), encoding="utf-8")


def read_outcome(record: Path) -> PreflightReport:
    """Read the report back; every field is checked, since the user's code ran in the process that wrote it.

    Raises:
        ArgumentError: If the process raised one, or the file is not what `write_outcome` writes.
    """
    reader = RecordReader("outcome", "isobit preflight")
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise reader.wrong("JSON", "outcome", str(error)) from None
    outcome: Outcome = reader.record(Outcome, found, "outcome")
    if outcome.error is not None:
        raise ArgumentError(**asdict(outcome.error))
    if outcome.report is None:
        raise reader.wrong("a report or an error", "outcome", "neither")
    return outcome.report


def run_script(
    script: TrialScript, config: dict[str, Any] | None, declare: dict[str, Any] | None
) -> PreflightReport:
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
        request = Request(script.steps, script.ranks, script.device, config, declare, str(record))
        is_simulated = script.ranks is not None or wants_device(script)
        with open(written, "wb") as output:
            done = subprocess.run(
                command(
                    ON_RANKS if is_simulated else IN_PROCESS,
                    json.dumps(asdict(request)),
                    script.path,
                    script.arguments,
                    variables=torchrun_variables(0, 1, free_port()) if script.torchrun else (),
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode or not record.exists():
            lines = last_lines(written)
            raise ArgumentError(
                expected="a script that runs up to its optimizer's steps",
                received=f"exit code {done.returncode} of {script.path}"
                + (f", after:\n{lines}" if lines else ""),
                remedy="run it with python first; --torchrun for one that needs torchrun's variables, and "
                "--ranks N for several; arguments after -- are passed to the script",
            )
        return read_outcome(record)


def wants_device(script: TrialScript) -> bool:
    """Return whether a script of one process asks for a device that this machine may lack; its process looks.

    A script that asks whether a device is there runs without one, and so do trainers that choose by themselves.
    """
    source = script.path.read_bytes()
    if script.device != "auto":
        return script.device != "cpu"
    return DEVICES.search(source) is not None and b"is_available" not in source
