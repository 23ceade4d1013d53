"""Read the log of a run as curves: JSON lines, CSV, transformers' trainer_state.json, and events of `watch`."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.files import read_bytes

LARGEST = 2**28  # bytes
NAMES = {
    "loss": ("loss", "train_loss", "train/loss", "training_loss", "lm loss", "train.loss"),
    "grad_norm": ("grad_norm", "train/grad_norm", "grad.norm", "gradient_norm", "grad norm"),
    "lr": ("learning_rate", "lr", "train/learning_rate", "train/lr", "learning rate"),
}
STEPS = (
    "step",
    "global_step",
    "train/global_step",
    "iteration",
    "iter",
    "_step",
    "trainer/global_step",
)
WORDS = {
    "nan": math.nan,
    "inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
Point = tuple[int, float]


@dataclass(frozen=True)
class RunLog:
    """The curves of one log.

    Attributes:
        path: The file.
        form: "jsonl", "csv", "events" or "trainer_state".
        curves: Points (step, value) in the order of the file, by "loss", "grad_norm" and "lr".
        rows: Entries that were read.
        skipped: Entries that are not readable, or have none of the curves.
        numbered: Whether entries have a step; else they are counted.
        reported: Findings of `watch` that the log has: (step, rule, message).
    """

    path: str
    form: str
    curves: Mapping[str, tuple[Point, ...]]
    rows: int
    skipped: int
    numbered: bool
    reported: tuple[tuple[int, str, str], ...] = ()


@dataclass
class Rows:
    """Entries while they are read."""

    curves: dict[str, list[Point]] = field(default_factory=dict)
    rows: int = 0
    skipped: int = 0
    numbered: bool = True
    reported: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, entry: Any) -> None:
        """Take one entry."""
        self.rows += 1
        if not isinstance(entry, dict):
            self.skipped += 1
            return
        given = next((entry[name] for name in STEPS if entry.get(name) is not None), None)
        step = number_of(given)
        if step is None or not math.isfinite(step):
            self.numbered = self.numbered and given is not None
            step = self.rows - 1
        if entry.get("kind") == "finding":
            self.reported.append((int(step), str(entry.get("name")), str(entry.get("message", ""))))
            return
        if entry.get("kind") == "metric":  # an event of `watch`
            entry = {str(entry.get("name")): entry.get("value")}
        found = False
        for curve, names in NAMES.items():
            name = next((name for name in names if name in entry), None)
            value = None if name is None else number_of(entry[name], missing=math.nan)
            if value is not None:
                found = True
                self.curves.setdefault(curve, []).append((int(step), value))
        self.skipped += not found


def number_of(value: Any, missing: float | None = None) -> float | None:
    """Return a number from JSON or CSV, None if it is not one. JSON's null is `missing`: pandas writes NaN so."""
    if value is None:
        return missing
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        word = value.strip().lower()
        if word in WORDS:
            return WORDS[word]
        try:
            return float(word)
        except ValueError:
            return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_log(path: Path) -> RunLog:
    """Read one log; the form is found from its contents.

    Args:
        path: A file.

    Returns:
        Its curves.

    Raises:
        ArgumentError: If it has no loss.
        OSError: If it cannot be read, or is larger than 256 MiB.
    """
    text = read_bytes(path, LARGEST).decode("utf-8", errors="replace").lstrip("\ufeff")
    entries, form, lost = entries_of(text)
    rows = Rows()
    for entry in entries:
        rows.add(entry)
    if not rows.curves.get("loss"):
        raise ArgumentError(
            expected=f"a log with a loss, called one of {', '.join(NAMES['loss'])}",
            received=f"{path}: {rows.rows} entries, and none has one",
            remedy="name a JSONL or CSV file of a run, or transformers' trainer_state.json",
        )
    if any(entry.get("kind") == "metric" for entry in entries[:100] if isinstance(entry, dict)):
        form = "events"
    curves = {name: tuple(points) for name, points in rows.curves.items()}
    return RunLog(
        str(path),
        form,
        curves,
        rows.rows + lost,
        rows.skipped + lost,
        rows.numbered,
        tuple(rows.reported),
    )


def entries_of(text: str) -> tuple[list[Any], str, int]:
    """Return the entries of a log, its form, and how many lines could not be read."""
    stripped = text.lstrip()
    if stripped[:1] in ("{", "["):
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            found, lost = lines_of(text.splitlines())
            return found, "jsonl", lost
        if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
            return whole["log_history"], "trainer_state", 0
        return (whole if isinstance(whole, list) else [whole]), "jsonl", 0
    rows = csv.DictReader(io.StringIO(text))
    try:
        return (
            [{k: v for k, v in row.items() if k and v not in ("", None)} for row in rows],
            "csv",
            0,
        )
    except csv.Error as error:
        raise ArgumentError(
            expected="JSON lines, CSV or trainer_state.json",
            received=f"a file that is none of these: {error}",
            remedy="export the run as JSONL or CSV",
        ) from error


def lines_of(lines: Iterable[str]) -> tuple[list[Any], int]:
    """Return the entries of JSON lines, and how many are not JSON: the last line of a killed run often is not."""
    found, lost = [], 0
    for line in lines:
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            lost += 1
    return found, lost
