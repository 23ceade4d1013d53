"""`isobit new`: write a contract for a function, or code for a contract; both to be completed by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isobit.cli.contract_options import open_workspace
from isobit.cli.terminal import say
from isobit.contracts.authoring.scaffold import scaffold, write_stubs
from isobit.errors import ArgumentError
from isobit.foundation import files


def add_parser(commands: Any) -> None:
    """Add the command's options."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "new",
        help="write a first contract for a function, or a first function for a contract",
        description="--from: read the source of a function, without importing it, and write NAME.contract.yaml here. "
        "--code: write NAME.py with a function that raises, and test_NAME.py with a failing test per claim.",
        epilog="examples: isobit new my-kernel-v1 --from my_package.ops:my_kernel; "
        "isobit new my_norm --code any-rms-norm-v1",
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the contract's id, as my-kernel-v1; with --code, a module's name",
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="reference", metavar="PACKAGE:FUNCTION", help="the subject")
    start.add_argument("--code", metavar="ID|FILE", help="the contract that the code is to keep")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")


def run(options: argparse.Namespace) -> int:
    """Write the files, unless one exists and --force is not given."""
    if options.code:
        return write_code(options)
    path = Path(f"{options.name}.contract.yaml")
    write_all({str(path): scaffold(options.name, options.reference)}, options.force)
    package = options.reference.partition(":")[0].partition(".")[0]
    say(
        f"wrote {path}; replace what is marked FILL IN, then run: isobit verify {path} --trust {package}"
    )
    return 0


def write_code(options: argparse.Namespace) -> int:
    """Write the code of a contract, and its tests."""
    is_file = Path(options.code).is_file()
    place = argparse.Namespace(which=[options.code], evidence=None)
    workspace, ids = open_workspace(place)
    (entry,) = workspace.choose(ids)
    where = options.code if is_file else entry.id
    write_all(write_stubs(options.name, workspace.tree.load(entry.id), where), options.force)
    say(
        f"wrote {options.name}.py and its failing tests; write the function, then run: pytest test_{options.name}.py"
    )
    return 0


def write_all(texts: dict[str, str], force: bool) -> None:
    """Write files, all or none.

    Raises:
        ArgumentError: If one exists, and `force` is not given.
    """
    for name in texts:
        if Path(name).exists() and not force:
            raise ArgumentError(
                expected="a name for which there is no file",
                received=f"{name} exists",
                remedy="choose another name, or use --force",
            )
    for name, text in texts.items():
        files.write_text(Path(name), text)
