"""`isobit contract explain`: print one contract in words: its equations, its claims, and the evidence for each."""

from __future__ import annotations

import argparse
from typing import Any

from isobit.cli.contract_options import open_workspace
from isobit.cli.terminal import make_console
from isobit.contracts.authoring.explain import explain
from isobit.foundation.plain_text import one_line, plain


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        description="Print the equations, the obligations, the claims and their evidence. Nothing is run.",
        epilog="example: isobit contract explain softmax-kernel-v1",
    )
    parser.add_argument("which", nargs=1, metavar="ID|PATH", help="a contract")
    parser.add_argument(
        "--evidence", metavar="DIR", help="where evidence is kept (default: .isobit here)"
    )
    parser.add_argument(
        "--subject",
        default="",
        metavar="NAME|CODE",
        help="evidence for another subject of the contract",
    )


def run(options: argparse.Namespace) -> int:
    """Print sections, each a heading and its lines."""
    workspace, ids = open_workspace(options)
    console = make_console(118)
    for entry in workspace.choose(ids):
        status = workspace.status(entry, options.subject, claims=True)
        for section in explain(workspace.tree.load(entry.id), status):
            console.print(one_line(section.title), style="bold")
            for line in section.lines:
                console.print("  " + plain(line).replace("\n", "\n  "))
    return 0
