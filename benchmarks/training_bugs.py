"""Known training bugs: found or not, by which check, at which step and rank; and right programs that must be silent."""

import functools
import importlib.util
import operator
import time

import torch
from rich.console import Console
from rich.table import Table

from isobit.foundation.majority import name_ranks
from isobit.guards import preflight
from isobit.simulator import World
from tests.guards.bugs import CATALOGUE
from tests.guards.right import ALONE, NEEDS, TOGETHER

GROUPS = {"20": "TrainCheck's table", "new": "found by TrainCheck", "more": "others"}


def run(quick, threads, dtypes):
    """Print a table; the exit code is 1 if a bug is judged other than stated or a right program blamed."""
    torch.set_num_threads(1)
    started = time.process_time()
    console = Console(width=240, highlight=False)
    table = Table("bug", "what is wrong", "found", "by", "rule", "step", "ranks", "right twin")
    wrong = noisy = 0
    counts = {group: [0, 0] for group in GROUPS}
    for bug in sorted(CATALOGUE.values(), key=lambda bug: [*GROUPS].index(bug.group)):
        found, twin = bug.look(True), bug.look(False)
        first = found[0] if found else None
        wrong += first != bug.finds
        noisy += bool(twin)
        counts[bug.group][0] += bool(first)
        counts[bug.group][1] += 1
        step = "" if first is None or first.step is None else str(first.step)
        table.add_row(
            bug.name,
            bug.title,
            "yes" if first else "no",
            bug.by if first else f"awaits {bug.awaits}",
            first.rule if first else "",
            step,
            name_ranks(first.ranks) if first and first.ranks else "",
            f"{len(twin)} findings" if twin else "silent",
        )
    console.print(table)
    for group, (found, total) in counts.items():
        console.print(f"{GROUPS[group]}: {found} of {total} found")
    console.print(f"right twins: {noisy} of {len(CATALOGUE)} with a finding")
    alarms = 0 if quick else count_alarms(console)
    console.print(f"{time.process_time() - started:.0f} s of one core")
    return int(bool(wrong or noisy or alarms))


def count_alarms(console):
    """Run every right program; return how many have findings, and fail if a package is missing."""
    missing = {package for package in NEEDS.values() if importlib.util.find_spec(package) is None}
    if missing:
        raise SystemExit(f"right programs need: pip install -c constraints.txt {' '.join(missing)}")
    alarms = 0
    for name, program in ALONE.items():
        torch.manual_seed(0)
        found = preflight(program).findings
        alarms += bool(found)
        if found:
            console.print(f"{name}: {', '.join(finding.rule for finding in found)}")
    for name, program in TOGETHER.items():
        found = World(4).run(program).values
        alarms += any(found)
        for event in functools.reduce(operator.iadd, found, []):
            console.print(f"{name}: {event}")
    console.print(
        f"right programs: {alarms} of {len(ALONE) + len(TOGETHER)} with a finding "
        f"({len(ALONE)} in preflight, {len(TOGETHER)} on 4 simulated ranks with watch)"
    )
    return alarms
