"""Parses the command line and hands it to a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import isobit
from isobit.cli import doctor, reveal, sweep
from isobit.errors import IsobitError

KEPT, BROKEN, COULD_NOT_RUN = 0, 1, 2


def build_parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    parser = argparse.ArgumentParser(
        prog="isobit",
        description="Bitwise-consistent training and inference for PyTorch, with the proof attached.",
        epilog="exit codes: 0 kept, 1 broken, 2 could not run",
    )
    parser.add_argument("--version", action="version", version=f"isobit {isobit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (doctor, reveal, sweep):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except IsobitError as error:
        print(f"isobit {options.command}: {error}", file=sys.stderr)
        return COULD_NOT_RUN
    return code


if __name__ == "__main__":
    sys.exit(main())
