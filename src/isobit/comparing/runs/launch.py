"""Run a script in fresh processes that record what it computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from isobit.comparing.runs import observed_run
from isobit.comparing.runs.fixes_by_name import VARIABLES
from isobit.errors import ArgumentError

POLL = 0.1  # seconds
LAST_LINES = 15
OTHERWISE = "run it with python first; words after -- go to the script"
REMEDIES = (  # what a script last wrote, and what helps
    (
        re.compile(r"\b(LOCAL_)?(RANK|WORLD_SIZE)\b|\bMASTER_(ADDR|PORT)\b"),
        "start it as torchrun's only rank: env RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 "
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 isobit twice …",
    ),
    (
        re.compile(
            r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|Torch not compiled with XPU"
        ),
        "pass --device cuda (or xpu, npu): the CPU then serves the device that the script names",
    ),
)


@dataclass(frozen=True)
class Job:
    """A script, its arguments, where its records are written, and the device that it finds: see `run_twice`."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    device: str = "cpu"
    python: str = sys.executable


def run_once(
    job: Job,
    name: str,
    steps: int,
    fixes: Sequence[str] = (),
    began: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Run the script in a fresh process, with the caller's environment, and return its record.

    Args:
        job: The script.
        name: Of the run; it names the record.
        steps: Optimizer steps after which the run ends.
        fixes: Suspects to fix, by name.
        began: When the first run began; files that changed since are reported when they are read.
        progress: Called with the number of steps done, now and then.

    Returns:
        The path of the record.

    Raises:
        ArgumentError: If the script fails.
    """
    record, told = job.folder / f"{name}.jsonl", job.folder / f"{name}.progress"
    orders = {
        "script": str(job.script),
        "arguments": list(job.arguments),
        "steps": steps,
        "device": job.device,
        "record": str(record.resolve()),
        "progress": str(told.resolve()),
        "fixes": list(fixes),
        "began": began or time.time(),
    }
    variables = [f"{k}={v}" for fix in fixes for k, v in VARIABLES.get(fix, {}).items()]
    command = ["env", *variables] if variables else []
    command += [job.python, str(Path(observed_run.__file__)), json.dumps(orders)]
    written = job.folder / f"{name}.output"
    with open(written, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            watch(process, told, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise failed(job, process.returncode, last_lines(written))
    return record


def watch(
    process: subprocess.Popen[bytes], told: Path, progress: Callable[[int], None] | None
) -> None:
    """Wait for a run, and pass on how many steps it has done."""
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
        with suppress(OSError, ValueError):
            if progress is not None:
                progress(int(told.read_text()))


def failed(job: Job, code: int, lines: str) -> ArgumentError:
    """Return the error for a script that failed, with the end of what it wrote."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ArgumentError(
        expected="a script that runs",
        received=f"{how} of {job.script}" + (f", after:\n{lines}" if lines else ""),
        remedy=next((r for what, r in REMEDIES if what.search(lines)), OTHERWISE),
    )


def last_lines(path: Path) -> str:
    """Return the last lines that a run wrote."""
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 8192))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])
