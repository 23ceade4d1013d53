"""The findings of a run, and the one that stops it."""

from __future__ import annotations

from isobit.errors import IsobitError, SimulationError


class Killed(BaseException):
    """Ends the thread of a rank. It is no `Exception`, so that a program does not catch it by accident."""


class Findings:
    """What the checkers of one run found, and why the run stops if it does.

    Attributes:
        strict: Whether `stop` ends the run.
        found: All findings, in the order in which they were made.
        root: The error that ends the run: every rank raises a copy of it at its next call.
        lost: By rank, a sentence about a message or a thread of the rank that was lost.
        failed: Ranks that raised an error of their own, in that order.
    """

    def __init__(self, strict: bool) -> None:
        """Start without findings."""
        self.strict = strict
        self.found: list[SimulationError] = []
        self.root: SimulationError | None = None
        self.lost: dict[int, str] = {}
        self.failed: list[int] = []

    def note(self, finding: SimulationError) -> None:
        """Record a finding and let the run go on."""
        self.found.append(finding)

    def stop(self, finding: SimulationError) -> None:
        """Record a finding; if the run is strict, end it with the first finding."""
        self.found.append(finding)
        self.end()

    def end(self) -> None:
        """End a strict run with its first finding."""
        if self.strict and self.root is None:
            self.root = self.found[0]


def copy_error(error: IsobitError) -> IsobitError:
    """Copy an error so that another rank can raise it with a traceback of its own."""
    if not isinstance(error, SimulationError):
        return type(error)(expected=error.expected, received=error.received, remedy=error.remedy)
    copied = type(error)(
        expected=error.expected,
        received=error.received,
        remedy=error.remedy,
        ranks=error.ranks,
        stacks=error.stacks,
    )
    kept = ("waits", "cycle", "kind", "note", "follows")
    vars(copied).update({name: value for name, value in vars(error).items() if name in kept})
    return copied
