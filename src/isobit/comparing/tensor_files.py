"""Read tensors from files safely: safetensors files, and files of torch.save without running the code in them.

Both return a `Checkpoint`, whose tensors are read one at a time.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from isobit.errors import ArgumentError
from isobit.foundation.addresses import Address, Place
from isobit.foundation.plain_text import one_line

# A checkpoint whose tensors are read one at a time.

DEEPEST = 64  # containers inside each other
LARGEST_EXPANSION = 1 << 30  # bytes that a tensor may have beyond its storage, as after `expand`


@dataclass(frozen=True)
class Segment:
    """Bytes of a file: `length` of them from `first` on."""

    path: Place
    first: int
    length: int


@dataclass(frozen=True)
class Run:
    """Elements of a part of a tensor, in row-major order: where they are stored, and their place in the part."""

    segment: Segment
    place: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return tuple(one.stop - one.start for one in self.place)


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        load: reads it.
        memory: equal for two names only if the file stores them as one tensor.
        segments: returns where its bytes are, in row-major order; None if they are not stored in that order.
        runs: returns where the bytes of a part are: given indices of the first dimensions, the elements of the next
            one from the first number up to the second, and all of those after it; None if only `load` can read them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    memory: tuple[Any, ...] = ()
    segments: Callable[[], tuple[Segment, ...] | None] = lambda: None
    runs: Callable[[tuple[int, ...], int, int], list[Run] | None] = lambda *_: None


def cut_rows(
    segment: Segment,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    index: tuple[int, ...],
    count: int,
) -> Segment:
    """Return where `count` elements of a dimension are, from `index` on, with all of the dimensions after it."""
    row = 0
    for at, size in zip(index, shape, strict=False):
        row = row * size + at
    width = math.prod(shape[len(index) :]) * dtype.itemsize
    return Segment(segment.path, segment.first + row * width, count * width)


@dataclass
class Checkpoint:
    """What a path contains.

    Attributes:
        path: where it is.
        kind: the format, in words.
        tensors: its tensors by name.
        values: numbers and texts by name, as text in which every bit of a float is visible.
        ties: names that are absent because they are another name's tensor, with what shows it.
        notes: what the reader had to decide.
    """

    path: Place
    kind: str
    tensors: dict[str, Stored] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    ties: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_tensor(self, name: str, tensor: Stored) -> None:
        """Add a tensor; raise if the name is taken."""
        self._check_free(name)
        self.tensors[name] = tensor

    def add_value(self, name: str, value: str) -> None:
        """Add a number or a text; raise if the name is taken."""
        self._check_free(name)
        self.values[name] = value

    def _check_free(self, name: str) -> None:
        if name in self.tensors or name in self.values:
            raise unreadable(self.path, "one entry per name", f"{one_line(name)!r} twice")


def unreadable(path: Place, expected: str, received: str, remedy: str = "") -> ArgumentError:
    """Return the error for a checkpoint that cannot be read."""
    return ArgumentError(
        expected=expected,
        received=f"{one_line(received)} in {path}",
        remedy=remedy or "save the checkpoint again, or name another file",
    )


def open_regular(path: Place) -> tuple[BinaryIO, int]:
    """Open a regular file and return it with its size; raise OSError for a device, a pipe or a folder."""
    if isinstance(path, Address):
        return path.open(), path.size()
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(handle, "rb"), found.st_size


def add_tree(found: Checkpoint, name: str, value: Any, inside: tuple[int, ...] = ()) -> None:
    """Add a tensor, a plain value, or a tree of them with dotted names.

    Args:
        found: Where to add it.
        name: Its name; "" for a whole file.
        value: Tensors and plain values in mappings, lists and tuples.
        inside: Identities of the containers around it.
    """
    if isinstance(value, torch.Tensor):
        found.add_tensor(name, stored_tensor(found.path, name, value))
    elif isinstance(value, Mapping):
        check_depth(found, name, value, inside)
        for key, item in value.items():
            path = f"{name}.{key}" if name else str(key)
            add_tree(found, path, item, (*inside, id(value)))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        check_depth(found, name, value, inside)
        texts = [plain_value(item) for item in value]
        if all(text is not None for text in texts):
            found.add_value(name, f"[{', '.join(text or '' for text in texts)}]")
            return
        for index, item in enumerate(value):
            path = f"{name}.{index}" if name else str(index)
            add_tree(found, path, item, (*inside, id(value)))
    else:
        text = plain_value(value)
        if text is None:
            kind = type(value).__name__
            raise unreadable(found.path, "tensors, numbers and texts", f"a {kind} at {name!r}")
        found.add_value(name, text)


def check_depth(found: Checkpoint, name: str, value: object, inside: tuple[int, ...]) -> None:
    """Raise if a container contains itself, or if containers are nested too deeply."""
    if id(value) in inside or len(inside) >= DEEPEST:
        raise unreadable(
            found.path, f"containers nested at most {DEEPEST} deep", f"more at {name[:200]!r}"
        )


def stored_tensor(path: Place, name: str, tensor: torch.Tensor) -> Stored:
    """Return a loaded (or mapped) tensor as an entry; raise for a layout without plain elements."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
    ):
        kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized}
        kinds |= {"meta": tensor.is_meta, str(tensor.layout): True}
        how = next(kind for kind, found in kinds.items() if found)
        raise unreadable(path, "dense tensors", f"a {how} tensor at {name!r}")
    storage = tensor.untyped_storage()
    if tensor.numel() * tensor.element_size() > storage.nbytes() + LARGEST_EXPANSION:
        raise unreadable(path, "as many elements as bytes", f"{list(tensor.shape)} at {name!r}")
    memory = (storage.data_ptr(), tensor.storage_offset(), tensor.stride(), tuple(tensor.shape))
    return Stored(
        tensor.dtype,
        tuple(tensor.shape),
        lambda: tensor.detach(),
        (*memory, tensor.dtype) if storage.data_ptr() else (),
    )


def plain_value(value: Any) -> str | None:
    """Return a number or a text as text, every bit of a float visible; None for anything else."""
    if isinstance(value, float):
        return f"{value!r} ({value.hex()})"
    if value is None or isinstance(value, bool | int | str | bytes | complex):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    return None


# Read files of torch.save without running code: only tensors, containers and plain values are unpickled.

ZIP = b"PK\x03\x04"


def read_torch_file(path: Place) -> Checkpoint:
    """Read a file of torch.save, with `weights_only=True` and mapped into memory where the format allows it.

    Args:
        path: A .pt, .pth, .bin or .ckpt file.

    Returns:
        The checkpoint, its containers flattened into dotted names.

    Raises:
        ArgumentError: If the file is damaged, or contains more than tensors, containers, numbers and texts.
        OSError: If the path is not a regular file.
    """
    if isinstance(path, Address):
        raise unreadable(
            path,
            "safetensors files or a folder of torch.distributed.checkpoint at an address",
            "a file of torch.save, whose tensors cannot be read one at a time from there",
            "copy the file to a local disk and name the copy",
        )
    file, _ = open_regular(path)
    with file:
        is_zip = file.read(4) == ZIP
    found = Checkpoint(path, "torch.save file")
    add_tree(found, "", load_safely(path, str(path), mmap=is_zip))
    return found


def load_safely(path: Place, source: str | io.BytesIO | BinaryIO, *, mmap: bool = False) -> Any:
    """Unpickle tensors and plain containers; raise for anything that could run code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats; what cannot be read raises
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        refused = re.search(
            r"GLOBAL (\S+)|[Uu]nsupported (?:global|operand|class)[^\n]*", str(error)
        )
        what = refused.group(0).rstrip(".") if refused else str(error).splitlines()[0]
        raise unreadable(
            path,
            "a file that weights_only=True can load: tensors, containers, numbers and texts",
            what[:300],
            "save the state dict instead of the object: its code is not run",
        ) from error
    except Exception as error:  # a damaged file raises almost anything
        lines = str(error).splitlines() or [type(error).__name__]
        raise unreadable(
            path,
            "a file of torch.save",
            lines[0][:300],
            "copy or download the file again: it is damaged, or in another format",
        ) from error


# Read safetensors files: eight bytes of length, a JSON header, raw data. Every length is checked.
#
# The reader does not need the safetensors package, reads only the bytes of the tensor that is asked
# for, and raises for a header that lies: about its own length, a tensor's bytes, or bytes that no
# tensor or two tensors claim.

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


def read_safetensors(path: Place) -> Checkpoint:
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


def read_header(path: Place) -> tuple[dict[str, Any], int, int]:
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
    path: Place, name: str, entry: Any, size: int
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


def check_spans(path: Place, spans: list[tuple[int, int, str]], size: int) -> None:
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
    path: Place, name: str, dtype: torch.dtype, shape: tuple[int, ...], first: int, length: int
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

    return Stored(dtype, shape, load, segments=lambda: (Segment(path, first, length),))
