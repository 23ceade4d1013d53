"""Writes to people: every text plain, markup off, so that nothing in a contract or a script acts on a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from isobit.errors import ContractError, IsobitError, SimulationError
from isobit.plain_text import plain
from isobit.records import to_json


class PlainConsole(Console):
    """A console of which only rich itself can colour or move anything."""

    def render_str(self, text: str, **style: Any) -> Text:
        """Clean before it is measured, so that tables stay aligned."""
        return super().render_str(plain(text), **style)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Clean whatever else is drawn; what rich does to the terminal is in control segments, which stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)

    def on_broken_pipe(self) -> NoReturn:
        """Leave the exit code to the command line: rich's own, 1, would say that something is broken."""
        raise BrokenPipeError


def make_console(
    width: int | None = None, stderr: bool = False, soft_wrap: bool = False
) -> Console:
    """For results on the output stream, or for progress on the error stream."""
    return PlainConsole(
        highlight=False, markup=False, emoji=False, width=width, stderr=stderr, soft_wrap=soft_wrap
    )


def say(text: object, stream: TextIO | None = None) -> None:
    """Write one line of plain text."""
    (stream or sys.stdout).write(plain(str(text)) + "\n")


def say_json(value: object) -> None:
    """Write a record, or a container of records, as JSON."""
    sys.stdout.write(to_json(value) + "\n")


def stop_writing() -> None:
    """After whoever read the output has gone: what Python still holds for it is dropped, without a complaint."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def say_error(command: str, error: BaseException) -> None:
    """Print a refusal on the error stream: expected, received and remedy on lines of their own."""
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
        say(
            plain(line).replace("\n", "\n    "), sys.stderr
        )  # a line that somebody forges is seen to be quoted


class PlainParser(argparse.ArgumentParser):
    """A parser whose complaints are plain too: names of files in a folder become words of a command line."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, exit with 2."""
        super().error(plain(message))
