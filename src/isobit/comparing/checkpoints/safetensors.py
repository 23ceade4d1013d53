"""Read safetensors files: eight bytes of length, a JSON header, raw data. Every length is checked.

The reader does not need the safetensors package, reads only the bytes of the tensor that is asked for, and raises for a
header that lies: about its own length, a tensor's bytes, or bytes that no tensor or two tensors claim.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from isobit.comparing.checkpoints.stored import Checkpoint, Stored, open_regular, unreadable

LARGEST_HEADER = 100_000_000  # bytes, the limit of the format
LARGEST_RANK = 64  # dimensions that torch supports
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}


def read_safetensors(path: Path) -> Checkpoint:
    """Read the header of a file, check it, and return its tensors, which are read later.

    Args:
        path: A file in the safetensors format.

    Returns:
        The checkpoint. Ties that `safetensors.torch.save_model` noted in the metadata are in its `ties`.

    Raises:
        ArgumentError: If the header does not describe the file exactly.
        OSError: If the path is not a regular file.
    """
    header, start, size = read_header(path)
    found = Checkpoint(path, "safetensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise unreadable(path, "metadata of texts", type(metadata).__name__)
    spans = []
    for name, entry in header.items():
        dtype, shape, first, last = read_entry(path, name, entry, size - start)
        spans.append((first, last, name))
        found.add_tensor(name, stored_span(path, name, dtype, shape, start + first, last - first))
    check_spans(path, spans, size - start)
    for absent, kept in metadata.items():
        if absent not in header and kept in header:
            found.ties[absent] = (kept, f"the metadata of {path.name}")
    return found


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header, where data starts, and the size of the file."""
    file, size = open_regular(path)
    with file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise unreadable(
                path,
                f"a header that fits into the file, of at most {LARGEST_HEADER:,} bytes",
                f"a header of {length:,} bytes in a file of {size:,}",
                "copy or download the file again: it is truncated, or not a safetensors file",
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "a JSON header", str(error)[:200]) from error
    if not isinstance(header, dict):
        raise unreadable(path, "a JSON object as header", type(header).__name__)
    return header, 8 + length, size


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise ValueError for a key that occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def read_entry(
    path: Path, name: str, entry: Any, size: int
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Check the header's entry of one tensor and return dtype, shape, and first and last byte."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise unreadable(path, "dtype, shape and data_offsets", f"another entry for {name!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise unreadable(
            path, f"a dtype out of {', '.join(DTYPES)}", f"{entry['dtype']!r} of {name!r}"[:300]
        )
    if not are_sizes(shape, size) or len(shape) > LARGEST_RANK:
        raise unreadable(path, "a shape of whole numbers", f"{shape!r} of {name!r}"[:300])
    if not are_sizes(offsets, size) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise unreadable(
            path,
            f"offsets within the {size:,} bytes of data",
            f"{offsets!r} of {name!r}"[:300],
            "copy or download the file again: it is truncated or damaged",
        )
    dtype = DTYPES[entry["dtype"]]
    needed = math.prod(shape) * dtype.itemsize
    if needed != offsets[1] - offsets[0]:
        raise unreadable(
            path, f"{needed:,} bytes for {name!r}", f"{offsets[1] - offsets[0]:,} bytes"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def are_sizes(numbers: Any, size: int) -> bool:
    """Return whether this is a list of whole numbers; a dimension beyond 64 bits is not one."""
    return isinstance(numbers, list) and all(
        type(n) is int and 0 <= n < max(1 << 63, size) for n in numbers
    )


def check_spans(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """Raise unless the tensors cover all bytes of the data once."""
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            problem = "bytes of two tensors" if first < end else "bytes of no tensor"
            raise unreadable(path, "every byte in one tensor", f"{problem} before {name!r}")
        end = last
    if end != size:
        raise unreadable(path, "every byte in one tensor", f"{size - end:,} bytes of no tensor")


def stored_span(
    path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], first: int, length: int
) -> Stored:
    """Return a tensor that is read from a span of bytes of the file."""

    def load() -> torch.Tensor:
        if not length:
            return torch.empty(shape, dtype=dtype)
        data = bytearray(length)
        file, _ = open_regular(path)
        with file:
            file.seek(first)
            if file.readinto(data) != length:  # type: ignore[attr-defined]
                raise unreadable(path, f"{length:,} bytes of {name!r}", "a file that has shrunk")
        if dtype is torch.bool and data.translate(None, b"\0\1"):
            raise unreadable(path, f"zeros and ones in {name!r}", "other bytes")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

    return Stored(dtype, shape, load)
