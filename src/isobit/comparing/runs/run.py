"""Run a script twice, compare the records, and find the cause of a difference."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from isobit.comparing.runs.causes import Trials, judge_causes, try_fixes
from isobit.comparing.runs.compare import compare_records
from isobit.comparing.runs.launch import Job, run_once
from isobit.comparing.runs.records import Comparison, Report
from isobit.errors import ArgumentError


def run_twice(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = 5,
    causes: bool = True,
    device: str = "cpu",
    progress: Callable[[str, int], None] | None = None,
) -> Report:
    """Run a script twice in fresh processes and compare what it computes, bit for bit.

    Args:
        script: A Python script that trains with an optimizer of torch.optim.
        arguments: Its command line.
        steps: Optimizer steps after which each run ends.
        causes: If the runs differ, run the script again with one suspect fixed at a time.
        device: The kind of device that the CPU serves, with torchrun's variables for one rank: "cuda", "xpu" or "npu";
            "auto" for the kind that the script names if this machine lacks it, "cpu" for none.
        progress: Called with what is running and the number of steps done.

    Returns:
        The first difference, where it comes from, and which of the usual causes apply.

    Raises:
        ArgumentError: If the script fails or takes no optimizer step.
    """
    began = time.time()
    tell = progress or (lambda what, done: None)
    with tempfile.TemporaryDirectory(prefix="isobit-twice-") as folder:
        job = Job(script.resolve(), tuple(arguments), Path(folder), device)
        records = [
            run_once(job, name, steps, began=began, progress=partial(tell, f"{name} run"))
            for name in ("first", "second")
        ]
        found = compare_records(*records)
        refuse_nothing(script, found)
        trials = Trials()
        if causes and not found.equal:
            trials = try_fixes(job, found, lambda what: tell(what, 0))
    judged = () if found.equal else tuple(judge_causes(found, trials))
    shown = str(script), tuple(arguments)
    served = found.evidence[0].get("served", "")
    return Report(*shown, found, judged, 2 + trials.runs, time.time() - began, served)


def refuse_nothing(script: Path, found: Comparison) -> None:
    """Raise if no optimizer step was seen: zero comparisons are not a pass."""
    if max(found.steps) == 0:
        raise ArgumentError(
            expected="a script that takes optimizer steps",
            received=f"no step of a torch.optim optimizer, and {found.operators:,} operators, in {script}",
            remedy="name the script that trains, in one process; words after -- go to the script",
        )
