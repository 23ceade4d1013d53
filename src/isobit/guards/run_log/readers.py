"""Read the log of a run as curves; its form is found from its contents."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.files import read_bytes
from isobit.guards.run_log import mlflow_runs, tensorboard_events
from isobit.guards.run_log.curves import Rows, RunLog, number_of

LARGEST = 2**28  # bytes


def read_log(path: Path, run: str = "") -> RunLog:
    """Read one log: JSON lines, CSV, trainer_state.json, events of `watch` or of TensorBoard, a run of MLflow.

    Args:
        path: A file, a folder of TensorBoard's event files, a folder or database of MLflow.
        run: Which run of MLflow, by id or name; needed if there are several.

    Returns:
        Its curves.

    Raises:
        ArgumentError: If it has no loss, or several runs and none is named.
        OSError: If it cannot be read, or is larger than 256 MiB.
    """
    if path.is_dir():
        if events := tensorboard_events.event_files(path):
            return tensorboard_events.read_events(path, events, LARGEST)
        return mlflow_runs.read_folder(path, run, LARGEST)
    data = read_bytes(path, LARGEST)
    if data.startswith(mlflow_runs.SQLITE):
        return mlflow_runs.read_database(path, run)
    if tensorboard_events.is_event_file(data):
        return tensorboard_events.read_events(path, [path], LARGEST)
    text = data.decode("utf-8", errors="replace").lstrip("\ufeff")
    entries, form, lost, max_steps = entries_of(text)
    rows = Rows()
    for entry in entries:
        rows.add(entry)
    return rows.as_log(path, form, lost, max_steps=max_steps)


def entries_of(text: str) -> tuple[list[Any], str, int, int | None]:
    """Return the entries of a log, its form, how many lines could not be read, and the steps of the whole run."""
    stripped = text.lstrip()
    if stripped[:1] in ("{", "["):
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            found, lost = lines_of(text.splitlines())
            return found, "jsonl", lost, None
        if isinstance(whole, dict) and isinstance(whole.get("log_history"), list):
            steps = number_of(whole.get("max_steps"))
            known = steps is not None and math.isfinite(steps) and steps > 0
            return whole["log_history"], "trainer_state", 0, int(steps or 0) if known else None
        return (whole if isinstance(whole, list) else [whole]), "jsonl", 0, None
    rows = csv.DictReader(io.StringIO(text))
    try:
        return (
            [{k: v for k, v in row.items() if k and v not in ("", None)} for row in rows],
            "csv",
            0,
            None,
        )
    except csv.Error as error:
        raise ArgumentError(
            expected="a log in a form that is read",
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
