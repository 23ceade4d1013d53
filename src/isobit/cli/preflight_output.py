"""What `isobit preflight` prints: a table of findings, notes, and the sentence with its denominators."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from isobit.foundation.majority import name_ranks
from isobit.foundation.plain_text import one_line
from isobit.guards.trial_run.page import headline, in_steps


def show_report(console: Console, name: str, report: dict[str, Any]) -> None:
    """Print the findings, what was not judged, and the sentence with its denominators."""
    if report["findings"]:
        table = Table("rule", "severity", "step", "found")
        for found in report["findings"]:
            words = f"{name_ranks(found['ranks'])}: " if found["ranks"] else ""
            words += f"{found['module']}: " if found["module"] else ""
            table.add_row(
                found["rule"],
                found["severity"],
                in_steps(found),
                one_line(words + found["message"]),
            )
        console.print(table)
    for note in report["notes"]:
        console.print(one_line(f"note: {note['message']}"))
    for check, reason in report["not_judged"].items():
        console.print(one_line(f"not judged: {check}: {reason}"))
    console.print(f"{one_line(name)}: {one_line(headline(report))}")
