"""Show progress on the error stream: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import argparse
import sys
import time
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from isobit.cli.terminal import make_console, say
from isobit.foundation.plain_text import one_line

SELDOM = 5.0  # seconds between lines of commands whose steps are short


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add the option that turns progress off."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="show no progress on the error stream"
    )


class Steps:
    """The steps of a command, as a context manager. Off a terminal, one line per `every` seconds at most."""

    def __init__(
        self, title: str, total: int | None = None, quiet: bool = False, every: float = 0.0
    ) -> None:
        self.title, self.total, self.quiet, self.every = title, total, quiet, every
        self.count, self.began, self.last = 0, time.monotonic(), time.monotonic()
        self.bar: Progress | None = None
        self.task = TaskID(0)

    def __enter__(self) -> Steps:
        console = make_console(stderr=True)
        # Check the stream itself: colours may be forced where there is no terminal.
        if not self.quiet and sys.stderr.isatty() and not console.is_dumb_terminal:
            words = TextColumn("{task.description}", markup=False)
            columns = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task(one_line(self.title), total=self.total)
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def now(self, name: str) -> None:
        """Name the step that is running."""
        if self.bar is not None:
            self.bar.update(self.task, description=one_line(name))

    def expect(self, total: int) -> None:
        """Set the number of steps, once it is known."""
        self.total = total
        if self.bar is not None:
            self.bar.update(self.task, total=total)

    def done(self, result: str, following: str = "", seconds: float | None = None) -> None:
        """Count a finished step; `result` describes it, and `following` names the next step."""
        self.count += 1
        if self.bar is not None:
            self.bar.update(
                self.task, completed=self.count, description=one_line(following or result)
            )
        self._line(f"[{self.count}/{self.total or '?'}] {result}", seconds)

    def at(self, stage: str, done: int, total: int) -> None:
        """Show how much of the current stage is done."""
        if self.bar is not None:
            self.bar.update(self.task, description=one_line(stage), completed=done, total=total)
        self._line(f"{stage}, {done} of {total}")

    def within(self, stage: str, done: int, total: int) -> None:
        """Show how much of the current step is done, without counting a step."""
        if self.bar is not None:
            self.bar.update(self.task, description=one_line(f"{stage}, {done} of {total}"))
        self._line(f"[{self.count}/{self.total or '?'}] {stage}, {done} of {total}")

    def _line(self, text: str, seconds: float | None = None) -> None:
        if self.bar is not None or self.quiet:
            return
        now = time.monotonic()
        if now - self.last >= self.every:
            # The time of this step if each step has a line, else of all.
            took = now - (self.began if self.every else self.last)
            say(f"{one_line(text)}, {took if seconds is None else seconds:.1f} s", sys.stderr)
            sys.stderr.flush()
            self.last = now
