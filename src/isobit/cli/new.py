"""`isobit new`: write a contract for a function, to be completed by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit import files
from isobit.cli.terminal import say
from isobit.contracts.authoring.scaffold import scaffold
from isobit.errors import ArgumentError


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "new",
        help="write a first contract for a function",
        description="Read the source of a function, without importing it, and write NAME.contract.yaml here.",
        epilog="example: isobit new my-kernel-v1 --from my_package.ops:my_kernel",
    )
    parser.add_argument("name", metavar="NAME", help="the contract's id, for example my-kernel-v1")
    parser.add_argument(
        "--from", dest="reference", required=True, metavar="PACKAGE:FUNCTION", help="the subject"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def run(options: argparse.Namespace) -> int:
    """Write the file, unless one exists and --force is not given."""
    path = Path(f"{options.name}.contract.yaml")
    text = scaffold(options.name, options.reference)
    if path.exists() and not options.force:
        raise ArgumentError(
            expected="a name for which there is no file",
            received=f"{path} exists",
            remedy="choose another name, or use --force",
        )
    files.write_text(path, text)
    package = options.reference.partition(":")[0].partition(".")[0]
    say(
        f"wrote {path}; replace what is marked FILL IN, then run: isobit verify {path} --trust {package}"
    )
    return 0
