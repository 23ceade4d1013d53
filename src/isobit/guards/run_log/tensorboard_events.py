"""Read TensorBoard's event files: scalars by step, without the package.

[Note: event files]
A file is a sequence of records: the length as 8 bytes, its checksum as 4, the data, the data's checksum as 4. Checksums
are CRC-32C, rotated and shifted by a constant. The data is an `Event` of protocol buffers, of which three fields are
read: step (2), file_version (3), summary (5); of a summary its values (1), each with tag (1) and simple_value (2) or
tensor (8). TensorBoard's own reader keeps a sample of 10,000 scalars per tag and drops steps that were logged again;
this one keeps all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from isobit.errors import ArgumentError
from isobit.foundation.files import read_bytes
from isobit.guards.run_log.curves import Rows, RunLog

NAME = "*.tfevents.*"
CHECKED = (
    2**16
)  # bytes of data up to which its checksum is computed: larger records are images and graphs
FORMATS = {1: "<f", 2: "<d"}  # of DT_FLOAT and DT_DOUBLE
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


def read_events(path: Path, files: Sequence[Path], largest: int, rows: Rows) -> RunLog:
    """Read event files as one log; those of a resumed run follow each other.

    Args:
        path: The file or folder that was named.
        files: The files, the oldest first.
        largest: Bytes of a file.
        rows: Where entries are added.

    Raises:
        ArgumentError: If a file is damaged before its last record, or no scalar is a loss.
    """
    for file in files:
        try:
            for event in records_in(read_bytes(file, largest)):
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


def records_in(data: bytes) -> Iterator[bytes | None]:
    """Yield the data of each record; None at the end if the last is not whole.

    Raises:
        ValueError: If a checksum is wrong.
    """
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        end = at + 12 + size
        if len(data) < at + 12:
            yield None
            return
        if int.from_bytes(data[at + 8 : at + 12], "little") != masked_crc(data[at : at + 8]):
            raise ValueError(f"damaged at byte {at:,}: the checksum of a length is wrong")
        if len(data) < end + 4:
            yield None
            return
        body = data[at + 12 : end]
        if size <= CHECKED and int.from_bytes(data[end : end + 4], "little") != masked_crc(body):
            raise ValueError(f"damaged at byte {at:,}: the checksum of a record is wrong")
        yield body
        at = end + 4


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
