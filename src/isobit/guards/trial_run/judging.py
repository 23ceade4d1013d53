"""What a check of a trial run yields, and how it says that it cannot judge."""

from __future__ import annotations

# rule, severity, message; and the step, if it is known
Found = tuple[str, str, str] | tuple[str, str, str, int]


class NotJudged(Exception):
    """A program that a check cannot judge, with the reason."""
