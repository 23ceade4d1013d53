"""`isobit graph`: what rests on what, with where each contract stands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit import files
from isobit.cli.contract_options import add_place, open_workspace
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.report.contract_graph import FORMATS, draw


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph",
        help="draw the graph of contracts",
        description="Draws contracts and what they rest on, coloured by where they stand. Imports nothing they name.",
    )
    add_place(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="(default text)")
    parser.add_argument("--out", metavar="FILE", help="write there instead of printing")


def run(options: argparse.Namespace) -> int:
    """The chosen contracts and all that they rest on."""
    workspace, ids = open_workspace(options)
    entries = workspace.with_dependencies(workspace.choose(ids))
    found = workspace.statuses(entries)
    text = draw(options.format, found, provenance_of(options, [status.digest for status in found]))
    if options.out:
        files.write_text(Path(options.out), text + "\n")
    else:
        say(text)
    return 0
