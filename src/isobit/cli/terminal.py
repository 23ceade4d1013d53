"""Write to the terminal as plain text, so that nothing in a contract or script can control it.

Loads neither rich nor numpy, YAML or torch: `isobit --help` imports it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

from isobit.errors import ContractError, IsobitError, SimulationError
from isobit.foundation.plain_text import plain

if TYPE_CHECKING:
    from rich.console import Console


def make_console(
    width: int | None = None, stderr: bool = False, soft_wrap: bool = False
) -> Console:
    """Return a console for results on the output stream, or for progress on the error stream."""
    from isobit.cli.console import PlainConsole

    return PlainConsole(
        highlight=False, markup=False, emoji=False, width=width, stderr=stderr, soft_wrap=soft_wrap
    )


def say(text: object, stream: TextIO | None = None) -> None:
    """Write one line of plain text."""
    (stream or sys.stdout).write(plain(str(text)) + "\n")


def say_json(value: object) -> None:
    """Write a record, or a container of records, as JSON."""
    from isobit.foundation.records import to_json

    sys.stdout.write(to_json(value) + "\n")


def stop_writing() -> None:
    """Drop buffered output without an error, after the reader of a pipe has gone."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say_error(command: str, error: BaseException) -> None:
    """Print an error on the error stream: expected, received and remedy on separate lines."""
    lines = [f"isobit {command}: {error}"]
    if isinstance(error, IsobitError):
        place = ""
        if isinstance(error, ContractError) and error.where:
            place = f" {error.where}:{error.line}:" if error.line else f" {error.where}:"
        lines = [f"isobit {command}:{place} expected {error.expected}"]
        lines += [f"  received: {error.received}", f"  remedy: {error.remedy}"]
    if isinstance(error, SimulationError):
        lines += [
            f"  rank {rank} at {stack[0]}" for rank, stack in sorted(error.stacks.items()) if stack
        ]
    for line in lines:
        # Indented, so that a line break inside a message cannot forge a line.
        say(plain(line).replace("\n", "\n    "), sys.stderr)


class PlainParser(argparse.ArgumentParser):
    """An argument parser whose error messages are plain text: they may quote names of files."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, exit with 2."""
        super().error(plain(message))
