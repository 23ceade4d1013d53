"""`isobit contract graph`: draw which contracts depend on which, with the status of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.contract_options import add_place, open_workspace
from isobit.cli.provenance import provenance_of
from isobit.cli.terminal import say
from isobit.contracts.report.graph import FORMATS, draw
from isobit.foundation import files


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph",
        description="Draw contracts and their dependencies, coloured by status. The code they name is not imported.",
        epilog="example: isobit contract graph isobit --format svg --out graph.svg",
    )
    add_place(parser)
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="(default text)")
    parser.add_argument("--out", metavar="FILE", help="write there instead of printing")


def run(options: argparse.Namespace) -> int:
    """Draw the chosen contracts and everything that they depend on."""
    workspace, ids = open_workspace(options)
    entries = workspace.with_dependencies(workspace.choose(ids))
    found = workspace.statuses(entries)
    text = draw(options.format, found, provenance_of(options, [status.digest for status in found]))
    if options.out:
        files.write_text(Path(options.out), text + "\n")
    else:
        say(text)
    return 0
