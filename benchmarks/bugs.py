"""Planted bugs under many schedules: how many are named with kind and ranks, and false alarms of right programs."""

import time

import torch
from rich.console import Console
from rich.table import Table

from tests.simulator.bugs import CATALOGUE, blamed, find


def run(quick, threads, dtypes):
    """Prints a table; the exit code is 1 if a bug was missed or a right program blamed."""
    seeds, clean_seeds = (3, 5) if quick else (50, 200)
    torch.set_num_threads(1)
    started = time.process_time()
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
        named = sum(is_named(bug, seed) for seed in range(seeds))
        cost = (time.process_time() - begun) / seeds * 1e3
        false = "as above"
        if bug.program not in judged:  # breakdowns share one right program
            judged.add(bug.program)
            false = sum(find(bug, seed, False) is not None for seed in range(clean_seeds))
            alarms += false
        missed += seeds - named
        culprits = " and ".join(" ".join(map(str, bug.culprits(seed))) for seed in (0, 1))
        table.add_row(bug.title, bug.kind, culprits, str(named), str(false), f"{cost:.0f}")
    console = Console(width=170, highlight=False)
    console.print(table)
    total, clean = len(CATALOGUE) * seeds, len(judged) * clean_seeds
    console.print(
        f"{len(CATALOGUE)} bugs x {seeds} seeds: {total - missed} of {total} named with kind and ranks"
    )
    console.print(
        f"{len(judged)} right programs x {clean_seeds} seeds: {alarms} false alarms of {clean}"
    )
    console.print(f"{time.process_time() - started:.0f} s of one core")
    return 1 if missed or alarms else 0


def is_named(bug, seed):
    """With its kind, and its ranks exactly."""
    error = find(bug, seed, True)
    return error is not None and (error.kind, blamed(error)) == (bug.kind, bug.culprits(seed))
