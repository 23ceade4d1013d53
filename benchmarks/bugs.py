"""Planted bugs under many schedules: how many are named with kind and ranks, and false alarms of right programs.

The verdict on each program is kept in a folder for temporary files until the simulator or the programs change, so that
a sweep that was stopped goes on, and two processes share one.
"""

import json
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from blake3 import blake3
from rich.console import Console
from rich.table import Table

from isobit.errors import SimulationError
from isobit.files import write_text
from isobit.simulator import World
from tests.simulator.bugs import CATALOGUE, blamed, find
from tests.simulator.clean_programs import PROGRAMS

ROOT = Path(__file__).parents[1]
JUDGED = (
    "src/isobit/simulator",
    *(f"src/isobit/{name}.py" for name in ("bits", "errors", "majority")),
    "tests/simulator/bugs",
    "tests/simulator/clean_programs.py",
)
WATCHES = ("bits", "reads", "training")


def run(quick, threads, dtypes):
    """Prints two tables; the exit code is 1 if a bug was missed or a right program blamed."""
    seeds, clean_seeds, more_seeds = (3, 5, 2) if quick else (50, 200, 20)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    twins = {bug.program.__name__: bug for bug in CATALOGUE.values()}  # breakdowns share one
    sweep = {f"bug {name}": (bug_misses, bug, seeds) for name, bug in CATALOGUE.items()}
    sweep |= {f"twin {name}": (twin_alarms, bug, clean_seeds) for name, bug in twins.items()}
    sweep |= {f"program {p.__name__}": (program_alarms, p, more_seeds) for p in PROGRAMS}
    verdicts = judge(sweep)
    console = Console(width=190, highlight=False)
    show_bugs(console, verdicts, seeds, clean_seeds)
    show_programs(console, verdicts, more_seeds)
    wrong = 0
    for kind, what, of, words in (
        ("bug", "bugs", seeds, "not named with kind and ranks, of"),
        ("twin", "right twins", clean_seeds, "false alarms of"),
        ("program", "other right programs", more_seeds, "false alarms of"),
    ):
        found = [v for key, v in verdicts.items() if key.split()[0] == kind]
        failed = sum(len(v["failed"]) for v in found)
        console.print(f"{len(found)} {what} x {of} seeds: {failed} {words} {len(found) * of}")
        wrong += failed
    console.print(f"{sum(v['seconds'] for v in verdicts.values()):.0f} s of one core")
    return int(wrong > 0)


def judge(sweep):
    """Return the verdict on each program, those of an earlier or another process included."""
    folder = Path(tempfile.gettempdir()) / f"isobit-bugs-{digest_of_sources()}"
    folder.mkdir(exist_ok=True)
    order = list(sweep)
    random.Random(os.getpid()).shuffle(order)  # two processes seldom do the same
    for done, key in enumerate(order):
        function, subject, seeds = sweep[key]
        path = folder / f"{key.replace(' ', '-')}-{seeds}.json"
        if not path.exists():
            begun = time.process_time()
            failed = {seed: said for seed in range(seeds) if (said := function(subject, seed))}
            seconds = time.process_time() - begun
            write_text(path, json.dumps({"failed": failed, "seconds": seconds}))
            print(f"{done + 1} of {len(order)}: {key}, {failed}", file=sys.stderr, flush=True)
        sweep[key] = json.loads(path.read_text())
    return sweep


def digest_of_sources():
    """Return a digest of what is judged and of torch's version."""
    hasher = blake3(torch.__version__.encode())
    for path in [ROOT / name for name in JUDGED]:
        for file in sorted(path.rglob("*.py")) or [path]:
            hasher.update(file.read_bytes())
    return hasher.hexdigest()[:16]


def bug_misses(bug, seed):
    """Return what was found instead of the bug, with its kind and its ranks exactly."""
    error = find(bug, seed, True)
    said = None if error is None else (error.kind, blamed(error))
    return "" if said == (bug.kind, bug.culprits(seed)) else str(said)


def twin_alarms(bug, seed):
    """Return what was found in the right twin of a bug."""
    error = find(bug, seed, False)
    return "" if error is None else error.one_line


def program_alarms(program, seed):
    """Return what was found in a program that is right in a way that a hasty watch would call wrong."""
    try:
        World(4, seed, watch=WATCHES).run(program, seed)
    except SimulationError as error:
        return error.one_line
    return ""


def show_bugs(console, verdicts, seeds, clean_seeds):
    table = Table(
        "bug",
        "named as",
        "ranks with seeds 0, 1",
        f"named of {seeds}",
        f"alarms of {clean_seeds}",
        "ms a run",
    )
    shown = set()
    for name, bug in CATALOGUE.items():
        found, twin = verdicts[f"bug {name}"], f"twin {bug.program.__name__}"
        alarms = "as above" if twin in shown else str(len(verdicts[twin]["failed"]))
        shown.add(twin)
        culprits = " and ".join(" ".join(map(str, bug.culprits(seed))) for seed in (0, 1))
        cost = f"{found['seconds'] / seeds * 1e3:.0f}"
        named = str(seeds - len(found["failed"]))
        table.add_row(bug.title, bug.kind, culprits, named, alarms, cost)
    console.print(table)


def show_programs(console, verdicts, seeds):
    table = Table("right program without a bug", f"alarms of {seeds}", "ms a run")
    for program in PROGRAMS:
        found = verdicts[f"program {program.__name__}"]
        cost = f"{found['seconds'] / seeds * 1e3:.0f}"
        table.add_row(program.__name__.replace("_", " "), str(len(found["failed"])), cost)
    console.print(table)
