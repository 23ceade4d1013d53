"""`isobit diff`: what changed between two versions of a contract, and which version number that asks for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.terminal import say
from isobit.contracts.language.diff import diff
from isobit.contracts.language.load import load_contract
from isobit.records import to_json


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "diff",
        help="compare two versions of a contract",
        description="Says which promises were added, removed, tightened or loosened, and the version that follows. "
        "Exit 0: the new version number says so; 1: it does not.",
    )
    parser.add_argument("old", metavar="A", type=Path)
    parser.add_argument("new", metavar="B", type=Path)
    parser.add_argument("--json", action="store_true", help="print a JSON record")


def run(options: argparse.Namespace) -> int:
    """A line a change, then the advice."""
    found = diff(load_contract(options.old), load_contract(options.new))
    say(to_json(found) if options.json else found)
    return 0 if found.enough else 1
