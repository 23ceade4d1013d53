"""`isobit explain`: one contract in words: its equations, its claims, and the evidence for each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from isobit.cli.where import open_workspace
from isobit.contracts.explain import explain
from isobit.contracts.load import load_contract


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="say in words what a contract promises and what is known of it",
        description="Prints the equations, the obligations, the claims and their evidence. Runs nothing.",
    )
    parser.add_argument("which", nargs=1, metavar="ID|PATH", help="a contract")
    parser.add_argument("--evidence", metavar="DIR", help="where evidence is kept (default: .isobit here)")
    parser.add_argument("--subject", default="", metavar="NAME|CODE", help="of other code, judged by the same contract")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Sections, each a heading and its lines."""
    workspace, ids = open_workspace(options)
    console = Console(highlight=False, width=118)
    for entry in workspace.choose(ids):
        status = workspace.status(entry, options.subject, claims=True)
        for section in explain(load_contract(Path(entry.path)), status):
            console.print(section.title, style="bold", markup=False)
            for line in section.lines:
                console.print(f"  {line}", markup=False)
    return 0
