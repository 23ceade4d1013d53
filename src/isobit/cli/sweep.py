"""`isobit sweep`: the invariance sweep of the linear operator, its stock control, and its sabotage."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.cli.progress import make_progress
from isobit.contracts import linear_sweep
from isobit.contracts.relations import RELATIONS
from isobit.contracts.subject import OURS
from isobit.records import Verdict, to_json


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "sweep",
        help="compare the linear operator's bits under everything that must not matter",
        description="Runs every relation on every shape: for isobit, which must keep all; for stock F.linear, the "
        "control, which must break some; and for planted wrong kernels, which must all be caught. Exit 0: so it "
        "is; 1: it is not.",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=linear_sweep.QUICK_LAYERS,
        metavar="NAME",
        help=f"layers whose names start so, of: {', '.join(linear_sweep.LAYERS)} (default: the small ones)",
    )
    parser.add_argument("--full", action="store_true", help="every row count from 1 to 257, not only the tile edges")
    parser.add_argument("--json", action="store_true", help="print JSON records instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints verdicts with their denominators."""
    with make_progress() as progress:
        chosen = linear_sweep.problems(options.layers, options.full)
        size = len(chosen) * len(RELATIONS)
        ours = list(progress.track(linear_sweep.sweep(OURS, chosen), size, description="isobit"))
        stock = list(progress.track(linear_sweep.control(chosen), size, description="stock"))
        planted = list(progress.track(linear_sweep.judge_sabotage(), description="sabotage"))
    if options.json:
        print(to_json({"isobit": ours, "stock": stock, "sabotage": [v for _, v in planted]}))
    else:
        show(ours, stock, planted)
    caught = sum(not verdict.kept and verdict.compared > 0 for _, verdict in planted)
    good = all(v.kept for v in ours) and any(v.differing for v in stock) and 0 < len(planted) == caught and bool(ours)
    return 0 if good else 1


def show(ours: list[Verdict], stock: list[Verdict], planted: list[tuple[str, Verdict]]) -> None:
    """For people."""
    console = Console(highlight=False, width=118)
    table = Table("subject", "relation", "compared", "isobit differs", "stock differs")
    for mine, control in zip(ours, stock, strict=True):
        table.add_row(
            mine.subject,
            mine.check,
            f"{mine.compared:,}",
            f"{mine.differing:,}" if mine.compared else "nothing compared",
            f"{control.differing:,}",
        )
    console.print(table)
    for verdict in ours:
        if not verdict.kept:
            console.print(f"BROKEN {verdict.subject}, {verdict.check}: {verdict.first}")
    first = next((v for v in stock if v.differing), None)
    if first is not None:
        console.print(f"stock, first: {first.subject}, {first.check}: {first.first}")
    table = Table("planted wrong kernel", "caught by", "differs", "of")
    for name, verdict in planted:
        word = verdict.check if verdict.differing else f"NOT CAUGHT by {verdict.check}"
        table.add_row(name, word, f"{verdict.differing:,}", f"{verdict.compared:,}")
    console.print(table)
    total = sum(v.compared for v in ours)
    caught = sum(v.differing > 0 for _, v in planted)
    console.print(
        f"isobit: {sum(v.differing for v in ours):,} of {total:,} elements differ over {len(ours)} verdicts; "
        f"stock breaks {sum(not v.kept for v in stock)} of {len(stock)}; "
        f"sabotage caught {caught} of {len(planted)}"
    )
