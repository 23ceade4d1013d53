"""Recorded hangs: what `isobit autopsy` and torch's own `fr_trace` say of the same dumps."""

import logging
import re
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.flight_recorder.fr_trace import main as fr_trace

from isobit.simulator.autopsy.examine import examine
from tests.simulator.autopsy.hangs import HANGS, record


def run(quick, threads, dtypes):
    """Print a table; the exit code is 1 if a hang was explained wrongly, or a right program was blamed."""
    torch.set_num_threads(1)
    started = time.process_time()
    table = Table("hang", "at fault", "shown by", "isobit autopsy", "fr_trace")
    right, theirs, alarms = 0, 0, 0
    for case in HANGS.values():
        with tempfile.TemporaryDirectory() as folder:
            record(case, Path(folder) / "planted")
            ours = judge_ours(case, Path(folder) / "planted")
            other = judge_fr_trace(case, Path(folder) / "planted")
            record(case, Path(folder) / "twin", planted=False)
            alarms += examine(Path(folder) / "twin").finding is not None
        right, theirs = right + (ours == "right"), theirs + (other == "right")
        ranks = " ".join(map(str, case.ranks))
        table.add_row(case.title, ranks, case.call, ours, other)
    console = Console(width=220, highlight=False)
    console.print(table)
    console.print(f"isobit autopsy: ranks and call right in {right} of {len(HANGS)} recorded hangs")
    console.print(f"fr_trace: right in {theirs} of {len(HANGS)}")
    console.print(f"right twins: {alarms} false alarms of {len(HANGS)}")
    console.print(f"{time.process_time() - started:.0f} s of one core")
    return int(right < len(HANGS) or alarms > 0)


def judge_ours(case, folder):
    """Return "right", or what was said instead."""
    found = examine(folder).finding
    if found is None:
        return "no hang"
    text = f"{found.expected}; {found.received}"
    said = f"{found.kind}, {' '.join(map(str, found.ranks))}"
    same = (found.kind, tuple(found.ranks)) == (case.kind, case.ranks) and case.call in text
    return "right" if same else said


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, entry):
        self.lines.append(entry.getMessage())


def judge_fr_trace(case, folder):
    """Return "right" if its first report has the call, and the ranks at fault or those that did not join."""
    kept, logger = Lines(), logging.getLogger("Flight Recorder")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.addHandler(kept)
    logger.propagate = False
    crash = ""
    try:
        fr_trace([str(folder), "--allow-incomplete-ranks"])
    except BaseException as error:
        crash = f"{type(error).__name__}: {error}"[:60]
    logger.removeHandler(kept)
    said = "\n".join(kept.lines)
    number = re.search(r"sequence number: (\d+)", said)
    named = re.search(r"missing ranks: \{([\d, ]+)\}", said)
    blamed = {int(rank) for rank in re.findall(r"Culprit rank (\d+)", said)}
    ranks = {int(word) for word in named[1].split(",")} if named else blamed
    if not number:
        return crash or ("no answer" if "MISMATCH" not in said else "a mismatch, no ranks")
    where = re.search(r"number (\d+)", case.call)
    if where and int(where[1]) == int(number[1]) and ranks in (set(case.ranks), set(case.absent)):
        return "right"
    return f"number {number[1]}, ranks {' '.join(map(str, sorted(ranks)))}" + (
        f", then {crash}" if crash else ""
    )
