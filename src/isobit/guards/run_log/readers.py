"""Read the log of a run as curves; its form is found from its contents.

Files are read entry by entry, whatever their size. A file of one JSON value is read whole, and so has a largest size.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sqlite3
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from isobit.errors import ArgumentError
from isobit.foundation.files import open_regular, read_bytes
from isobit.foundation.plain_text import one_line
from isobit.guards.run_log.curves import Rows, RunLog, number_of

# Read TensorBoard's event files: scalars by step, without the package.
#
# [Note: event files]
# A file is a sequence of records: the length as 8 bytes, its checksum as 4, the data, the data's
# checksum as 4. Checksums are CRC-32C, rotated and shifted by a constant. The data is an `Event` of
# protocol buffers, of which three fields are read: step (2), file_version (3), summary (5); of a
# summary its values (1), each with tag (1) and simple_value (2) or tensor (8). TensorBoard's own
# reader keeps a sample of 10,000 scalars per tag and drops steps that were logged again; this one
# keeps all of them.

NAME = "*.tfevents.*"
CHECKED = (
    2**16
)  # bytes of data up to which its checksum is computed: larger records are images and graphs
FORMATS = {1: "<f", 2: "<d"}  # of DT_FLOAT and DT_DOUBLE
LARGEST_RECORD = 2**26  # bytes
LARGEST_LINE = 2**24  # characters
Field = tuple[int, int | bytes]


def make_table() -> list[int]:
    """Return CRC-32C of every byte."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = make_table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record's part."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, the oldest first: their names have the time at which they were opened."""
    return sorted(path for path in folder.glob(NAME) if path.is_file())


def is_event_file(data: bytes) -> bool:
    """Return whether data begins with a record: a length and its checksum."""
    return len(data) >= 12 and int.from_bytes(data[8:12], "little") == masked_crc(data[:8])


def read_events(path: Path, files: Sequence[Path], rows: Rows) -> RunLog:
    """Read event files as one log; those of a resumed run follow each other.

    Args:
        path: The file or folder that was named.
        files: The files, the oldest first.
        rows: Where entries are added.

    Raises:
        ArgumentError: If a file is damaged before its last record, or no scalar is a loss.
    """
    for file in files:
        try:
            with io.BufferedReader(open_regular(file)) as opened:
                for event in records_in(opened):
                    if event is None:  # what a killed run was writing
                        rows.add_unreadable(is_cut=True)
                    else:
                        add_scalars(event, rows)
        except (ValueError, IndexError) as error:
            raise damaged(file, str(error)) from None
    return rows.as_log(path, "tensorboard")


def damaged(file: Path, why: str) -> ArgumentError:
    """Return the error for a file that cannot be read further."""
    return ArgumentError(
        expected="an event file of TensorBoard that is whole up to its last record",
        received=f"{file}: {why}",
        remedy="copy it again from where it was written, or export its scalars as CSV",
    )


def records_in(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield the data of each record; None at the end if the last is not whole.

    Raises:
        ValueError: If a checksum is wrong, or a record is larger than any that has scalars.
    """
    at = 0
    while head := file.read(12):
        if len(head) < 12:
            yield None
            return
        if int.from_bytes(head[8:], "little") != masked_crc(head[:8]):
            raise ValueError(f"damaged at byte {at:,}: the checksum of a length is wrong")
        size = int.from_bytes(head[:8], "little")
        if size > LARGEST_RECORD:
            raise ValueError(f"a record of {size:,} bytes at byte {at:,}")
        body, check = file.read(size), file.read(4)
        if len(check) < 4:
            yield None
            return
        if size <= CHECKED and int.from_bytes(check, "little") != masked_crc(body):
            raise ValueError(f"damaged at byte {at:,}: the checksum of a record is wrong")
        yield body
        at += size + 16


def add_scalars(event: bytes, rows: Rows) -> None:
    """Add every scalar of an event as an entry."""
    step, summaries = 0, []
    for number, value in fields_of(event):
        if number == 2 and isinstance(value, int):
            step = value - 2**64 if value >= 2**63 else value
        elif number == 5 and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in fields_of(summary):
            if number == 1 and isinstance(value, bytes):
                tag, scalar = scalar_in(value)
                if scalar is not None:
                    rows.add({"step": step, tag: scalar})


def scalar_in(data: bytes) -> tuple[str, float | None]:
    """Return the tag of a summary's value and its scalar; None for images, histograms and texts."""
    tag, scalar = "", None
    for number, value in fields_of(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", errors="replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            scalar = struct.unpack("<f", value)[0]
        elif number == 8 and isinstance(value, bytes):
            scalar = scalar_of_tensor(value)
    return tag, scalar


def scalar_of_tensor(data: bytes) -> float | None:
    """Return the number of a tensor of one element, as TensorFlow 2 writes scalars."""
    found = dict(fields_of(data))
    kind = found.get(1)
    form = FORMATS.get(kind) if isinstance(kind, int) else None
    content = found.get(4) or found.get(5 if form == "<f" else 6)
    if form is None or not isinstance(content, bytes) or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])


def fields_of(data: bytes) -> Iterator[Field]:
    """Yield number and value of each field: an integer for varints, else bytes.

    Raises:
        ValueError: If it is no message of protocol buffers.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            whole, at = varint(data, at)
            yield number, whole
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind}")
        size, at = varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + size > len(data):
            raise ValueError("a field that is longer than its message")
        yield number, data[at : at + size]
        at += size


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of up to ten bytes, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("an integer of more than ten bytes")


# Read a run of MLflow: from its folder of plain files (`mlruns`), or from its SQLite database, without the package.

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
        with io.BufferedReader(open_regular(file)) as opened:
            for line in lines_in(opened, "\n"):
                words = (line or "").split()  # time, value, step
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


LARGEST = 2**28  # bytes of a file that is read whole


def read_log(path: Path, run: str = "", columns: Mapping[str, str] | None = None) -> RunLog:
    """Read one log: JSON lines, CSV, trainer_state.json, printed text, events of `watch` or TensorBoard, an MLflow run.

    Args:
        path: A file, a folder of TensorBoard's event files, a folder or database of MLflow.
        run: Which run of MLflow, by id or name; needed if there are several.
        columns: Names of columns by "loss", "grad_norm", "lr" or "step", if they are not the usual ones; an empty
            name states that the log has no such column.

    Returns:
        Its curves.

    Raises:
        ArgumentError: If it has no loss, several runs and none is named, or is a trainer_state.json that is cut.
        OSError: If it cannot be read, or is one JSON value, as trainer_state.json, of more than 256 MiB.
    """
    rows = Rows(columns or {})
    if not path.exists():
        raise ArgumentError(
            expected="the log of a run",
            received=f"{path}, which does not exist",
            remedy="name a file or folder that the run wrote, such as out/checkpoint-100/trainer_state.json",
        )
    if path.is_dir():
        if events := event_files(path):
            return read_events(path, events, rows)
        return read_folder(path, run, LARGEST, rows)
    with io.BufferedReader(open_regular(path)) as file:
        start = file.read(len(SQLITE))
        if start == SQLITE:
            return read_database(path, run, rows)
        if is_event_file(start):
            return read_events(path, [path], rows)
        try:
            form, max_steps = add_entries(path, file, rows)
            return rows.as_log(path, form, max_steps=max_steps)
        except ArgumentError:
            printed = Rows(columns or {})
            add_text(file, printed)
            if not printed.has_loss:
                raise
    return printed.as_log(path, "text")


def lines_in(file: BinaryIO, newline: str) -> Generator[str | None]:
    """Yield the lines of a file from its start; what is no UTF-8 is replaced, and None is a line that is too long."""
    file.seek(0)
    text = io.TextIOWrapper(file, "utf-8-sig", "replace", newline)
    try:
        while line := text.readline(LARGEST_LINE):
            is_whole = len(line) < LARGEST_LINE or line.endswith(("\n", "\r"))
            yield line if is_whole else None
            while not is_whole:  # the rest of it
                line = text.readline(LARGEST_LINE)
                is_whole = len(line) < LARGEST_LINE or line.endswith(("\n", "\r"))
    finally:
        text.detach()  # the file stays open


def add_entries(path: Path, file: BinaryIO, rows: Rows) -> tuple[str, int | None]:
    """Add the entries of a file; return its form, and the steps of the whole run if it has them."""
    with closing(lines_in(file, "\n")) as lines:
        first = next((line for line in lines if line is None or line.strip()), "")
        has_more = any(line is None or line.strip() for line in lines)
    if first is not None and first.strip()[:1] not in ("{", "["):
        add_csv(file, rows)
        return "csv", None
    if first is not None and has_more and is_json(first):
        add_lines(file, rows)
        return "jsonl", None
    file.seek(0)
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(
            f"{path} has no entry in its first line, and is larger than {LARGEST:,} bytes"
        )
    text = data.decode("utf-8-sig", "replace")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if '"log_history"' in text or path.name == "trainer_state.json":
            raise broken_state(path, text, error) from None
        add_lines(file, rows)
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


def broken_state(path: Path, text: str, error: Exception) -> ArgumentError:
    """Return the error for a trainer_state.json that is no JSON: cut at its end, or damaged before it."""
    size, why = len(text.rstrip()), str(error)
    if isinstance(error, json.JSONDecodeError):
        is_cut = error.pos > size - 16 or error.msg.startswith("Unterminated")
        why = (
            f"truncated: the JSON ends within a value, after {size:,} characters" if is_cut else why
        )
    return ArgumentError(
        expected="a trainer_state.json that is whole",
        received=f"{path}, which is {why if why.startswith('truncated') else f'no JSON: {one_line(why)}'}",
        remedy="copy it again, or name that of an earlier checkpoint: checkpoint-…/trainer_state.json",
    )


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def add_lines(file: BinaryIO, rows: Rows) -> None:
    """Add the entries of JSON lines. The last line of a killed run often is not whole."""
    decode = json.JSONDecoder().raw_decode
    for line in lines_in(file, "\n"):
        if line is None:
            rows.add_unreadable()
            continue
        text = line.strip()
        if not text:
            continue
        try:
            entry, end = decode(text)
        except (ValueError, RecursionError):
            rows.add_unreadable(is_cut=not line.endswith("\n"))
        else:
            rows.add(entry if end == len(text) else None)


def short_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of CSV; raise csv.Error for one that is too long."""
    for line in lines_in(file, ""):
        if line is None:
            raise csv.Error(f"a line of more than {LARGEST_LINE:,} characters")
        yield line


def add_csv(file: BinaryIO, rows: Rows) -> None:
    """Add the rows of CSV. One with fewer or more fields than the first is not read: its columns may be others."""
    reader = csv.reader(short_lines(file), skipinitialspace=True)
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
        file.seek(-1, os.SEEK_END)
        rows.add_unreadable(is_cut=file.read(1) != b"\n")


# Read what a run printed: the dictionaries of transformers' Trainer, and lines such as `iter 100: loss 2.3, time 12ms`.
# Lines of another form are passed over. Nothing is executed.

LONGEST = 10_000  # characters of a line that is read
PRINTED = re.compile(r"\{'[^{}]*\}")
ITEM = re.compile(r"'([^']{1,100})'\s*:\s*'?([^,'}]*)")
STEP = re.compile(r"\b(?:iter|iteration|step)\s*:?\s*(\d{1,15})(?:\s*/\s*\d+)?\s*[:|,]", re.I)


def add_text(file: BinaryIO, rows: Rows) -> None:
    """Add the entries of printed text. A dictionary of the Trainer has no step, so that entries are counted."""
    for line in lines_in(file, ""):
        if line is None or len(line) > LONGEST:
            continue
        if found := PRINTED.search(line):
            entry = {name: value.strip() for name, value in ITEM.findall(found[0])}
        elif found := STEP.search(line):
            entry = dict(pair_of(part) for part in re.split("[,|]", line[found.end() :]))
            entry = {"step": found[1], **entry}
        else:
            continue
        if any(name in rows.curve_of for name in entry):
            rows.add(entry)


def pair_of(text: str) -> tuple[str, str]:
    """Return name and value of `name: value`, `name=value` or `name value`."""
    name, sign, value = text.partition(":" if ":" in text else "=")
    if not sign:
        name, _, value = text.strip().rpartition(" ")
    return name.strip().lower(), value.strip()
