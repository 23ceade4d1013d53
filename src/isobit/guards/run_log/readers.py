"""Read the log of a run as curves; its form is found from its contents."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.guards.run_log import mlflow_runs, tensorboard_events
from isobit.guards.run_log.curves import Rows, RunLog, number_of

LARGEST = 2**28  # bytes


def read_log(path: Path, run: str = "", columns: Mapping[str, str] | None = None) -> RunLog:
    """Read one log: JSON lines, CSV, trainer_state.json, events of `watch` or of TensorBoard, a run of MLflow.

    Args:
        path: A file, a folder of TensorBoard's event files, a folder or database of MLflow.
        run: Which run of MLflow, by id or name; needed if there are several.
        columns: Names of columns by "loss", "grad_norm", "lr" or "step", if they are not the usual ones; an empty
            name states that the log has no such column.

    Returns:
        Its curves.

    Raises:
        ArgumentError: If it has no loss, or several runs and none is named.
        OSError: If it cannot be read, or is larger than 256 MiB.
    """
    rows = Rows(columns or {})
    if path.is_dir():
        if events := tensorboard_events.event_files(path):
            return tensorboard_events.read_events(path, events, LARGEST, rows)
        return mlflow_runs.read_folder(path, run, LARGEST, rows)
    data = read_bytes(path, LARGEST)
    if data.startswith(mlflow_runs.SQLITE):
        return mlflow_runs.read_database(path, run, rows)
    if tensorboard_events.is_event_file(data):
        return tensorboard_events.read_events(path, [path], LARGEST, rows)
    form, max_steps = add_entries(data, rows)
    return rows.as_log(path, form, max_steps=max_steps)


def text_of(data: bytes, newline: str) -> TextIO:
    """Return a file's text to be read line by line; what is no UTF-8 is replaced."""
    return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", "replace", newline)


def add_entries(data: bytes, rows: Rows) -> tuple[str, int | None]:
    """Add the entries of a file; return its form, and the steps of the whole run if it has them."""
    lines = text_of(data, "\n")
    first = next((line for line in lines if line.strip()), "").strip()
    if first[:1] not in ("{", "["):
        add_csv(data, rows)
        return "csv", None
    if is_json(first) and any(line.strip() for line in lines):
        add_lines(data, rows)
        return "jsonl", None
    try:
        whole = json.loads(text_of(data, "\n").read())
    except (ValueError, RecursionError):
        add_lines(data, rows)
        return "jsonl", None
    form, entries, max_steps = "jsonl", whole if isinstance(whole, list) else [whole], None
    if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
        form, entries = "trainer_state", whole["log_history"]
        steps = number_of(whole.get("max_steps"))
        if steps is not None and math.isfinite(steps) and steps > 0:
            max_steps = int(steps)
    for entry in entries:
        rows.add(entry)
    return form, max_steps


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def add_lines(data: bytes, rows: Rows) -> None:
    """Add the entries of JSON lines. The last line of a killed run often is not whole."""
    decode = json.JSONDecoder().raw_decode
    for line in text_of(data, "\n"):
        text = line.strip()
        if not text:
            continue
        try:
            entry, end = decode(text)
        except (ValueError, RecursionError):
            rows.add_unreadable(is_cut=not line.endswith("\n"))
        else:
            rows.add(entry if end == len(text) else None)


def add_csv(data: bytes, rows: Rows) -> None:
    """Add the rows of CSV. One with fewer or more fields than the first is not read: its columns may be others."""
    reader = csv.reader(text_of(data, ""), skipinitialspace=True)
    is_short = False  # whether the last row was
    try:
        names = [name.strip() for name in next((row for row in reader if row), [])]
        for row in reader:
            if is_short:
                rows.add_unreadable()
            is_short = bool(row) and (len(row) < len(names) or any(row[len(names) :]))
            if row and not is_short:
                rows.add({name: word for name, word in zip(names, row, strict=False) if word})
    except csv.Error as error:
        raise ArgumentError(
            expected="a log in a form that is read",
            received=f"a file that is none of these: {error}",
            remedy="export the run as JSONL or CSV",
        ) from error
    if is_short:
        rows.add_unreadable(is_cut=not data.endswith(b"\n"))
