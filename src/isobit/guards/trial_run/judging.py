"""What a check of a trial run yields, and how it says that it cannot judge."""

from __future__ import annotations

Found = tuple[str, str, str]  # rule, severity, message


class NotJudged(Exception):
    """A program that a check cannot judge, with the reason."""
