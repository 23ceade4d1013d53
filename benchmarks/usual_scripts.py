"""The usual scripts with `.cuda()` and nccl, right and with planted faults, in preflight, simulate and twice."""

import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from isobit.comparing.runs.run import run_twice
from isobit.guards.trial_run.ranks import preflight_ranks
from isobit.simulator.program.script import Script
from isobit.simulator.sweep import Plan, run_seed
from tests.guards.usual_faults import FAULTS, SCRIPTS

QUICK = ("ddp_loop", "fsdp2_loop")


def run(quick, threads, dtypes):
    """Print a table; the exit code is 1 if a right script has a finding, or a fault other than one row of its rule."""
    torch.set_num_threads(1)
    started = time.process_time()
    console = Console(width=160, highlight=False)
    table = Table("script", "fault", "preflight", "preflight --ranks 2", "simulate", "twice")
    wrong = right = planted = 0
    for path in sorted(SCRIPTS.glob("*.py")):
        if quick and path.stem not in QUICK:
            continue
        cells = [rules_of(path.read_text(), path.stem, ranks) for ranks in (1, 2)]
        cells.append([found.kind for found in run_seed(Plan(Script(path, []), 2, [0]), 0).found])
        twice = run_twice(path, steps=2, causes=False, device="auto").comparison
        cells.append([] if twice.equal else [str(twice.changed)])
        right += 4
        wrong += sum(map(bool, cells))
        table.add_row(path.stem, "", *(", ".join(cell) or "nothing found" for cell in cells))
        for fault in (each for each in FAULTS if each.script == path.stem):
            cells = []
            for ranks in (1, 2):
                if ranks not in fault.ranks:
                    cells.append("no fault there")
                    continue
                found = rules_of(
                    fault.plant(), path.stem, ranks, steps=fault.steps, config=fault.config
                )
                planted += 1
                wrong += found != [fault.rule]
                cells.append(", ".join(found) or "nothing found")
            table.add_row("", fault.name, *cells, "", "")
    console.print(table)
    console.print(f"{right} runs of right scripts, {planted} with a fault; {wrong} not as stated")
    console.print(f"{time.process_time() - started:.0f} s of one core")
    return int(bool(wrong))


def rules_of(text, name, ranks, **options):
    """Return the rules that a preflight of a script finds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(text)
        report = preflight_ranks(script, ranks=ranks, **options)
    return [finding.rule for finding in report.findings]
