"""Planted bugs under many schedules: how many are named with kind and ranks, and false alarms of right programs.

The verdict on each program is kept (kept.py), so that a sweep that was stopped goes on, and two processes share one.
"""

import os
import random
import sys
import time
import warnings
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kept import SIMULATOR, Kept
from isobit.errors import SimulationError
from isobit.simulator import World
from tests.simulator.bugs import CATALOGUE, blamed, find
from tests.simulator.clean_programs import PROGRAMS

JUDGED = (*SIMULATOR, "tests/simulator/bugs", "tests/simulator/clean_programs.py")
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
    kept, order = Kept("bugs", JUDGED), list(sweep)
    random.Random(os.getpid()).shuffle(order)  # two processes seldom do the same
    for done, key in enumerate(order):
        verdict = kept.result(f"{key} {sweep[key][-1]}", partial(try_seeds, *sweep[key]), is_clean)
        print(
            f"{done + 1} of {len(order)}: {key}, {verdict['failed']}", file=sys.stderr, flush=True
        )
        sweep[key] = verdict
    return sweep


def is_clean(verdict):
    return not verdict["failed"]


def try_seeds(function, subject, seeds):
    """Return what a function says of each seed on which a subject fails, and the time that it takes."""
    begun = time.process_time()
    failed = {seed: said for seed in range(seeds) if (said := function(subject, seed))}
    return {"failed": failed, "seconds": time.process_time() - begun}


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
