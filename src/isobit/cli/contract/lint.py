"""`isobit contract lint`: report problems of contract files with line and remedy; `--schema` prints the format."""

from __future__ import annotations

import argparse
from typing import Any

from isobit.cli.contract_options import add_place, open_workspace
from isobit.cli.terminal import say, say_json
from isobit.contracts.authoring.lint import lint
from isobit.contracts.language.load import json_schema
from isobit.errors import ContractError, in_one_line
from isobit.foundation.plain_text import one_line


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "lint",
        description="Load every contract and check every name in it. Report obligations without a claim, claims "
        "without sabotage, missing code, circular dependencies and expired waivers. The code is not imported.",
        epilog="example: isobit contract lint my-kernel-v1.contract.yaml",
    )
    add_place(parser)
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON schema of a contract, for editors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON records")


def run(options: argparse.Namespace) -> int:
    """Print one line per problem, as file:line: message."""
    if options.schema:
        say_json(json_schema())
        return 0
    workspace, ids = open_workspace(options)
    if ids:
        workspace.tree.chosen = [workspace.tree.find(id).id for id in ids]
    found = list(lint(workspace.tree))
    if options.json:
        say_json([as_record(error) for error in found])
    else:
        for error in found:
            say(one_line(in_one_line(error)))
        count = len(workspace.tree.chosen) + len(workspace.tree.broken)
        say(f"{len(found)} problems in {count} contracts")
    return 1 if found else 0


def as_record(error: ContractError) -> dict[str, Any]:
    """Return the fields of a problem for JSON."""
    return {
        "file": error.where,
        "line": error.line,
        "expected": error.expected,
        "received": error.received,
        "remedy": error.remedy,
    }
