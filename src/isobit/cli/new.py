"""`isobit new`: writes a contract for a function; it fails until it is filled in."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit import files
from isobit.cli.terminal import say
from isobit.contracts.authoring.scaffold import scaffold
from isobit.errors import ArgumentError


def add_parser(commands: Any) -> None:
    """Adds the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "new",
        help="write a contract to start from",
        description="Reads the function's source, without importing it, and writes NAME.contract.yaml beside you.",
    )
    parser.add_argument("name", metavar="NAME", help="the contract's id, as my-kernel-v1")
    parser.add_argument(
        "--from", dest="reference", required=True, metavar="PACKAGE:FUNCTION", help="the subject"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def run(options: argparse.Namespace) -> int:
    """Refuses to replace what somebody wrote."""
    path = Path(f"{options.name}.contract.yaml")
    text = scaffold(options.name, options.reference)
    if path.exists() and not options.force:
        raise ArgumentError(
            expected="a name that is free",
            received=f"{path} exists",
            remedy="choose another, or --force",
        )
    files.write_text(path, text)
    package = options.reference.partition(":")[0].partition(".")[0]
    say(f"wrote {path}; fill in what it asks for, then: isobit verify {path} --trust {package}")
    return 0
