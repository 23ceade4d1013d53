"""Planted bugs under many schedules: how many are named with kind and ranks, and false alarms of right programs."""

import sys
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table

from isobit.errors import SimulationError
from isobit.simulator import World
from tests.simulator.bugs import CATALOGUE, blamed, find
from tests.simulator.clean_programs import PROGRAMS

WATCHES = ("bits", "reads", "training")


def run(quick, threads, dtypes):
    """Prints two tables; the exit code is 1 if a bug was missed or a right program blamed."""
    seeds, clean_seeds = (3, 5) if quick else (50, 200)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    started = time.process_time()
    console = Console(width=190, highlight=False)
    missed, twins, false = judge_bugs(console, seeds, clean_seeds)
    false += judge_programs(console, clean_seeds)
    total, right = len(CATALOGUE) * seeds, twins + len(PROGRAMS)
    console.print(
        f"{len(CATALOGUE)} bugs x {seeds} seeds: {total - missed} of {total} named with kind and ranks"
    )
    console.print(
        f"{right} right programs x {clean_seeds} seeds: {false} false alarms of {right * clean_seeds}"
    )
    console.print(f"{time.process_time() - started:.0f} s of one core")
    return 1 if missed or false else 0


def judge_bugs(console, seeds, clean_seeds):
    """Print a row per bug; return how many runs missed it, how many right twins there are, and their alarms."""
    table = Table(
        "bug",
        "named as",
        "ranks with seeds 0, 1",
        f"named of {seeds}",
        f"alarms of {clean_seeds}",
        "ms a run",
    )
    missed, alarms, judged = 0, 0, set()
    for bug in CATALOGUE.values():
        begun = time.process_time()
        wrong, false = [seed for seed in range(seeds) if not is_named(bug, seed)], {}
        cost = (time.process_time() - begun) / seeds * 1e3
        found = "as above"
        if bug.program not in judged:  # breakdowns share one right program
            judged.add(bug.program)
            false = alarms_of(lambda seed, bug=bug: find(bug, seed, False), clean_seeds)
            alarms += len(false)
            found = str(len(false))
        missed += len(wrong)
        report(bug.name, wrong, false)
        culprits = " and ".join(" ".join(map(str, bug.culprits(seed))) for seed in (0, 1))
        table.add_row(bug.title, bug.kind, culprits, str(seeds - len(wrong)), found, f"{cost:.0f}")
    console.print(table)
    return missed, len(judged), alarms


def judge_programs(console, seeds):
    """Print a row per program that is right in a way that a hasty watch would call wrong; return the alarms."""
    table = Table("right program without a bug", f"alarms of {seeds}", "ms a run")
    alarms = 0
    for program in PROGRAMS:
        begun = time.process_time()
        false = alarms_of(lambda seed, program=program: run_right(program, seed), seeds)
        cost = (time.process_time() - begun) / seeds * 1e3
        alarms += len(false)
        report(program.__name__, [], false)
        table.add_row(program.__name__.replace("_", " "), str(len(false)), f"{cost:.0f}")
    console.print(table)
    return alarms


def run_right(program, seed):
    """Return what is found in a right program."""
    try:
        World(4, seed, watch=WATCHES).run(program, seed)
    except SimulationError as error:
        return error
    return None


def alarms_of(judge, seeds):
    """Return the findings of a right program, by seed."""
    return {seed: error for seed in range(seeds) if (error := judge(seed)) is not None}


def report(name, missed, false):
    """Write the seeds to look into to the error stream, and how far the sweep is."""
    alarms = {seed: error.one_line for seed, error in false.items()}
    print(name, f"missed: {missed}", f"alarms: {alarms}", file=sys.stderr, flush=True)


def is_named(bug, seed):
    """With its kind, and its ranks exactly."""
    error = find(bug, seed, True)
    return error is not None and (error.kind, blamed(error)) == (bug.kind, bug.culprits(seed))
