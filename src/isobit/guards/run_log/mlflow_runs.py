"""Read a run of MLflow: from its folder of plain files (`mlruns`), or from its SQLite database, without the package."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.guards.run_log.curves import Rows, RunLog

SQLITE = b"SQLite format 3\x00"
LARGEST_NUMBER = 1.7976931348623157e308  # what MLflow's databases have for infinity
SHOWN = 5


def read_folder(folder: Path, run: str, largest: int, rows: Rows) -> RunLog:
    """Read a run from a folder: the run's own, its experiment's, or `mlruns`.

    Args:
        folder: The folder.
        run: The id of the run; needed if there are several.
        largest: Bytes of a file.
        rows: Where entries are added.

    Raises:
        ArgumentError: If there is no run, or several and none is named.
    """
    found = {}
    for pattern in ("metrics", "*/metrics", "*/*/metrics"):
        for path in sorted(folder.glob(pattern)):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):  # .trash
                found[path.parent.name] = path.parent
    home = found[choose(folder, dict.fromkeys(found, ""), run)]
    for key, file in files_below(home / "metrics"):
        if key not in rows.curve_of:
            rows.find_places((key,))
            continue
        for line in read_bytes(file, largest).decode("utf-8", errors="replace").splitlines():
            words = line.split()  # time, value, step
            known = len(words) == 3
            rows.add({"step": words[2], key: words[1]} if known else None)
    config = {
        key: read_bytes(file, largest).decode("utf-8", errors="replace").strip()
        for key, file in files_below(home / "params")
    }
    # A metric's file has numbers as words, so that NaN is no surprise there.
    rows.worded = 0
    return rows.as_log(home, "mlflow", config=config or None)


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """Return the files of a folder by the name of their metric, in which a slash is a folder; links are left out."""
    found = []
    for home, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(home) / name
            if not path.is_symlink():
                found.append((path.relative_to(folder).as_posix(), path))
    return found


def read_database(path: Path, run: str, rows: Rows) -> RunLog:
    """Read a run from MLflow's SQLite database, which is opened for reading only.

    Args:
        path: The file, such as mlflow.db.
        run: The id or the name of the run; needed if there are several.
        rows: Where entries are added.

    Raises:
        ArgumentError: If it is no database of MLflow, has no run, or several and none is named.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            query = "SELECT run_uuid, name FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time"
            names = {str(id): str(name or "") for id, name in database.execute(query)}
            chosen = choose(path, names, run)
            query = (
                "SELECT key, value, step, is_nan FROM metrics WHERE run_uuid = ? "
                "ORDER BY timestamp, rowid"
            )
            for key, value, step, is_nan in database.execute(query, (chosen,)):
                if str(key) not in rows.curve_of:
                    rows.find_places((str(key),))
                else:
                    rows.add({"step": step, str(key): number_from(value, is_nan)})
            query = "SELECT key, value FROM params WHERE run_uuid = ?"
            config = {str(key): value for key, value in database.execute(query, (chosen,))}
    except sqlite3.Error as error:
        raise ArgumentError(
            expected="a database of MLflow, with tables runs, metrics and params",
            received=f"{path}: {error}",
            remedy="name the file of sqlite:///… in MLFLOW_TRACKING_URI, or a folder mlruns",
        ) from None
    return rows.as_log(path, "mlflow", config=config or None)


def number_from(value: Any, is_nan: Any) -> Any:
    """Return a metric's value as it was logged: SQL has no NaN and no infinity."""
    if is_nan:
        return float("nan")
    if isinstance(value, float) and abs(value) == LARGEST_NUMBER:
        return value * 2
    return value


def choose(path: Path, runs: Mapping[str, str], wanted: str) -> str:
    """Return the id of the run that is named by id or name, or of the only one.

    Raises:
        ArgumentError: If there is none, or several.
    """
    matching = [id for id, name in runs.items() if not wanted or wanted in (id, name)]
    if len(matching) == 1:
        return matching[0]
    some = [f"{id} ({runs[id]})" if runs[id] else id for id in list(runs)[:SHOWN]]
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    raise ArgumentError(
        expected=f"one run{f' called {wanted}' if wanted else ''}, or a folder of TensorBoard's event files",
        received=f"{path}: {len(matching)} of {len(runs)} runs: {', '.join(some) or 'none'}{more}",
        remedy="name it: --run ID" if runs else "name the folder of a run",
    )
