"""Find the format of a path and read it: a file, a folder with or without an index, or folders per rank.

[Note: Files of a folder]
Files whose tensors have different names are parts of one checkpoint. Files that share names are shards of ranks, and
need a rank number in their name: `rank_0`, `mp_rank_00`, `shard-1`. The tensors of rank k are then called `name@k`, and
names.py puts them together. Links to regular files are followed, since download caches consist of them.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import torch

from isobit.comparing.tensor_files import (
    Checkpoint,
    Run,
    Segment,
    Stored,
    add_tree,
    cut_rows,
    load_safely,
    open_regular,
    read_safetensors,
    read_torch_file,
    unreadable,
)
from isobit.errors import ArgumentError
from isobit.foundation.addresses import Address, Place

# Read folders of torch.distributed.checkpoint, tensor by tensor, without a process group and
# without running code.
#
# [Note: Metadata without code]
# The reader of torch.distributed.checkpoint calls `pickle.load` on the file `.metadata`, which runs
# whatever the file names. Here an unpickler knows the dozen names that such a file needs, and
# returns records of this module for them; any other name raises. Chunks are loaded with
# `weights_only=True`.

METADATA = ".metadata"
LARGEST_METADATA = 1 << 31


class Record:
    """Any object of the metadata: its attributes, and nothing that runs."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Keep the arguments: an enumeration's value, the parts of a path."""
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Keep what was pickled."""
        self.state = state

    def get(self, name: str) -> Any:
        """Return an attribute, None if it is not there."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def make_size(numbers: Any = ()) -> tuple[int, ...]:
    """Return a shape or an offset; raise if it is not made of whole numbers."""
    found = tuple(numbers)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in found):
        raise pickle.UnpicklingError("a shape with negative or broken numbers")
    return found


def make_member(of: Any, name: Any) -> Record:
    """Return a member of the one enum that metadata has; raise for an attribute of anything else."""
    if of is not MEMORY_FORMAT or type(name) is not str:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    member: Record = MEMORY_FORMAT(name)
    return member


KINDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
HOME = "torch.distributed.checkpoint"
# A class of its own for each name, so that a file cannot say "tensor" and mean "bytes".
KNOWN: dict[tuple[str, str], Any] = {
    (f"{HOME}.metadata", name): type(name, (Record,), {}) for name in KINDS
} | {
    (f"{HOME}.filesystem", "_StorageInfo"): type("_StorageInfo", (Record,), {}),
    ("torch", "Size"): make_size,
    ("torch.serialization", "_get_layout"): str,
    ("pathlib", "PosixPath"): Record,
    ("pathlib", "PurePosixPath"): Record,
    ("pathlib", "WindowsPath"): Record,
    ("collections", "OrderedDict"): dict,
}
# Python 3.11.0 to 3.11.3 write a member of an enum as getattr(class, name).
KNOWN["builtins", "getattr"] = make_member
MEMORY_FORMAT = KNOWN[f"{HOME}.metadata", "_MEM_FORMAT_ENCODING"]
TENSOR = KNOWN[f"{HOME}.metadata", "TensorStorageMetadata"]
BYTES = KNOWN[f"{HOME}.metadata", "BytesStorageMetadata"]


class MetadataReader(pickle.Unpickler):
    """Unpickles metadata; see [Note: Metadata without code]."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the record for a name that metadata needs; raise for any other."""
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def read_distributed(folder: Place) -> Checkpoint:
    """Read the metadata of a folder of torch.distributed.checkpoint and return its tensors, which are read later.

    Args:
        folder: A folder with the file `.metadata`.

    Returns:
        The checkpoint. A sharded tensor is one entry: its chunks are put together when it is loaded.

    Raises:
        ArgumentError: If the metadata is damaged, contains code, or names files outside of the folder.
    """
    metadata = read_metadata(folder)
    found = Checkpoint(folder, "torch.distributed.checkpoint folder")
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    for index, place in items(folder, metadata, "storage_data"):
        name, offset = index.get("fqn"), index.get("offset") or ()
        if not isinstance(name, str) or not isinstance(offset, tuple):
            raise unreadable(folder, "a name and an offset for every place", "something else")
        places.setdefault(name, {})[offset] = place
    for name, entry in items(folder, metadata, "state_dict_metadata"):
        chunks = places.get(name, {})
        if isinstance(entry, TENSOR):
            found.add_tensor(name, stored_chunks(folder, name, entry, chunks))
        elif isinstance(entry, BYTES) and chunks:
            read = io.BytesIO(read_place(folder, name, chunks.get(())))
            add_tree(found, name, load_safely(folder, read))
        else:
            raise unreadable(folder, "metadata of tensors and values", f"neither at {name!r}")
    return found


def read_metadata(folder: Place) -> Record:
    """Unpickle the metadata without running code."""
    file, size = open_regular(folder / METADATA)
    with file:
        if size > LARGEST_METADATA:
            raise unreadable(
                folder, f"metadata of at most {LARGEST_METADATA:,} bytes", f"{size:,} bytes"
            )
        try:
            found = MetadataReader(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise unreadable(
                folder,
                "metadata of torch.distributed.checkpoint",
                (str(error).splitlines() or [type(error).__name__])[0][:300],
                "write the checkpoint again: code in its metadata is not run",
            ) from error
    if not isinstance(found, Record):
        raise unreadable(folder, "metadata of torch.distributed.checkpoint", type(found).__name__)
    return found


def items(folder: Place, metadata: Record, name: str) -> list[tuple[Any, Any]]:
    """Return the entries of one of the metadata's dictionaries."""
    found = metadata.get(name)
    if not isinstance(found, dict) or not all(isinstance(v, Record) for v in found.values()):
        raise unreadable(folder, f"{name} in the metadata", type(found).__name__)
    wanted = Record if name == "storage_data" else str
    if not all(isinstance(key, wanted) for key in found):
        raise unreadable(folder, f"names in {name}", "other keys")
    return list(found.items())


def stored_chunks(
    folder: Place, name: str, entry: Record, places: dict[tuple[int, ...], Any]
) -> Stored:
    """Return a tensor that is put together from its chunks when it is loaded."""
    shape, properties, chunks = entry.get("size"), entry.get("properties"), entry.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(shape, tuple) or not isinstance(dtype, torch.dtype):
        raise unreadable(folder, "a dtype and a size", f"another entry for {name!r}")
    if not isinstance(chunks, list) or not all(isinstance(c, Record) for c in chunks):
        raise unreadable(folder, "a list of chunks", f"another entry for {name!r}")
    spans = [(chunk.get("offsets"), chunk.get("sizes")) for chunk in chunks]
    check_cover(folder, name, shape, spans)

    @functools.cache
    def located() -> tuple[Segment, ...] | None:
        found = [
            locate_chunk(folder, name, places.get(offsets), dtype, sizes)
            for offsets, sizes in spans
        ]
        return None if None in found else tuple(one for one in found if one is not None)

    def segments() -> tuple[Segment, ...] | None:
        if any(sizes[1:] != shape[1:] for _, sizes in spans):
            return None  # chunks are cut along another dimension than the first
        found = located()
        if found is None:
            return None
        order = sorted(range(len(spans)), key=lambda at: spans[at][0])
        return tuple(found[at] for at in order if math.prod(spans[at][1]))

    def runs(lead: tuple[int, ...], start: int, stop: int) -> list[Run] | None:
        where, axis = located(), len(lead)
        if where is None:
            return None
        found = []
        for (offsets, sizes), segment in zip(spans, where, strict=True):
            first, last = max(start, offsets[axis]), min(stop, offsets[axis] + sizes[axis])
            inside = [at - o for at, o in zip(lead, offsets, strict=False)]
            is_in = all(0 <= at < n for at, n in zip(inside, sizes, strict=False))
            if first >= last or not is_in or not math.prod(sizes):
                continue
            rest = [slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)][axis + 1 :]
            place = (slice(first - start, last - start), *rest)
            index = (*inside, first - offsets[axis])
            found.append(Run(cut_rows(segment, dtype, sizes, index, last - first), place))
        return found

    def load() -> torch.Tensor:
        data = [read_place(folder, name, places.get(offsets)) for offsets, _ in spans]
        if sum(map(len, data)) < math.prod(shape) * dtype.itemsize:
            raise unreadable(folder, f"bytes for all elements of {name!r}", "fewer bytes")
        whole = torch.empty(shape, dtype=dtype)
        for (offsets, sizes), read in zip(spans, data, strict=True):
            chunk = load_safely(folder, io.BytesIO(read))
            if not isinstance(chunk, torch.Tensor) or (chunk.dtype, tuple(chunk.shape)) != (
                dtype,
                sizes,
            ):
                raise unreadable(folder, f"a chunk {list(sizes)} of {name!r}", "another tensor")
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[slices] = chunk
        return whole

    return Stored(dtype, shape, load, segments=segments, runs=runs)


def locate_chunk(
    folder: Place, name: str, place: Record | None, dtype: torch.dtype, sizes: tuple[int, ...]
) -> Segment | None:
    """Return where a chunk's elements are, without reading them; None if they are not in row-major order.

    A chunk is a file of torch.save inside a larger file. Under FakeTensorMode torch.load reads its pickle alone and
    notes at which byte the storage begins.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    path, offset, length = find_place(folder, name, place)
    file, _ = open_regular(path)
    with file, FakeTensorMode():
        chunk = load_safely(folder, cast(BinaryIO, Window(file, offset, length)))
        if not isinstance(chunk, torch.Tensor) or (chunk.dtype, tuple(chunk.shape)) != (
            dtype,
            sizes,
        ):
            raise unreadable(folder, f"a chunk {list(sizes)} of {name!r}", "another tensor")
        start = getattr(chunk.untyped_storage(), "_checkpoint_offset", None)
        first = -1 if start is None else start + chunk.storage_offset() * dtype.itemsize
        plain = chunk.is_contiguous() and not chunk.is_conj() and not chunk.is_neg()
    size = math.prod(sizes) * dtype.itemsize
    if first < 0 or not plain:
        return None
    if first + size > length:
        raise unreadable(folder, f"bytes for all elements of {name!r}", "fewer bytes")
    return Segment(path, offset + first, size)


def read_segment(segment: Segment, into: bytearray | None = None) -> bytearray:
    """Read the bytes of a segment, into the beginning of a buffer if one is given."""
    data = bytearray(segment.length) if into is None else into
    part = memoryview(data)[: segment.length]
    if isinstance(segment.path, Address):
        found = segment.path.read(segment.first, segment.first + segment.length)
        count = len(found)
        part[:count] = found
    else:
        file, _ = open_regular(segment.path)
        with file:
            file.seek(segment.first)
            count = file.readinto(part)  # type: ignore[attr-defined]
    if count != segment.length:
        raise unreadable(segment.path, f"{segment.length:,} bytes", "a file that has shrunk")
    return data


class Window(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, file: BinaryIO, first: int, length: int) -> None:
        """Take `length` bytes from `first` on."""
        self.file, self.first, self.length, self.at = file, first, length, 0

    def seekable(self) -> bool:
        """Return that a position can be chosen."""
        return True

    def readable(self) -> bool:
        """Return that bytes can be read."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Choose a position."""
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer what the window still has."""
        wanted = max(0, min(len(buffer), self.length - self.at))
        self.file.seek(self.first + self.at)
        data = self.file.read(wanted)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def check_cover(folder: Place, name: str, shape: tuple[int, ...], spans: list[Any]) -> None:
    """Raise unless the chunks lie in the tensor, do not overlap, and have all its elements."""
    for offsets, sizes in spans:
        if not (isinstance(offsets, tuple) and isinstance(sizes, tuple)) or not (
            len(offsets) == len(sizes) == len(shape)
            and all(o + n <= s for o, n, s in zip(offsets, sizes, shape, strict=True))
        ):
            raise unreadable(
                folder, f"chunks within {list(shape)}", f"{offsets}, {sizes} of {name!r}"
            )
    if sum(math.prod(sizes) for _, sizes in spans) != math.prod(shape):
        raise unreadable(folder, f"chunks that cover {list(shape)}", f"fewer or more for {name!r}")
    full = [span for span in spans if math.prod(span[1])]
    # Chunks are sorted along the dimension that cuts most, so that few pairs meet along it.
    cut = max(range(len(shape)), key=lambda d: len({o[d] for o, _ in full}), default=None)
    full = full if cut is None else sorted(full, key=lambda span: span[0][cut])
    for i, (first, size) in enumerate(full):
        for second, other in full[i + 1 :]:
            if cut is not None and second[cut] >= first[cut] + size[cut]:
                break
            meets = zip(first, size, second, other, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in meets):
                raise unreadable(folder, "chunks that do not overlap", f"two of {name!r}")


def read_place(folder: Place, name: str, place: Record | None) -> bytes:
    """Read the bytes of one chunk; raise for a file outside of the folder, or bytes that are not there."""
    path, offset, length = find_place(folder, name, place)
    return bytes(read_segment(Segment(path, offset, length)))


def find_place(folder: Place, name: str, place: Record | None) -> tuple[Place, int, int]:
    """Return file, first byte and length of a chunk; raise if it is outside of the folder or not there."""
    if place is None:
        raise unreadable(folder, f"a place for every chunk of {name!r}", "none")
    relative, offset, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if place.get("transform_descriptors"):
        raise unreadable(folder, "chunks without compression", f"transformed bytes of {name!r}")
    if not isinstance(relative, str) or not is_inside(relative):
        raise unreadable(folder, "files inside the folder", f"{relative!r} for {name!r}")
    file, size = open_regular(folder / relative)
    file.close()
    numbers = type(offset) is int and type(length) is int and offset >= 0 and length >= 0
    if not numbers or offset + length > size:
        raise unreadable(
            folder,
            f"bytes within the {size:,} of {relative}",
            f"{length} bytes from {offset} for {name!r}",
            "copy the folder again: a file is truncated",
        )
    return folder / relative, offset, length


def is_inside(relative: str) -> bool:
    """Return whether a path that a checkpoint names stays inside its folder."""
    path = PurePosixPath(relative.replace("\\", "/"))
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and ":" not in relative
    )


LARGEST_INDEX = 1 << 28
# Files of these names next to a checkpoint are not part of the model.
BESIDE = re.compile(r"(training_args|rng_state(_\d+)?|scaler)\.(bin|pt|pth)")
RANK = re.compile(r"(?:^|[^a-z])(?:mp_?)?(?:rank|shard|tp|part)[_-]?(\d+)(?:\D|$)", re.IGNORECASE)
READERS: dict[str, Callable[[Place], Checkpoint]] = {
    ".safetensors": read_safetensors,
    ".pt": read_torch_file,
    ".pth": read_torch_file,
    ".bin": read_torch_file,
    ".ckpt": read_torch_file,
}


def read_checkpoint(path: Place) -> Checkpoint:
    """Read what a path contains: names, dtypes and shapes now, tensors later.

    Args:
        path: A safetensors file, a file of torch.save, a folder of such files with or without an index, a folder of
            torch.distributed.checkpoint, or a folder with a folder per rank.

    Returns:
        The checkpoint.

    Raises:
        ArgumentError: If nothing there can be read, if a file is damaged, or if reading it would run code.
        OSError: If the path, or a file in it, is not there or is not a regular file.
    """
    found = read_folder(path) if path.is_dir() else read_file(path)
    add_configured_tie(found, path if path.is_dir() else path.parent)
    return found


def read_file(path: Place) -> Checkpoint:
    """Read one file, by its ending."""
    if path.name.endswith(".index.json"):
        return read_index(path.parent, path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
        raise unreadable(
            path,
            f"a folder, or a file that ends with {', '.join(READERS)} or .index.json",
            f"{path.suffix or 'no ending'}",
            "name the checkpoint itself",
        )
    return reader(path)


def read_folder(folder: Place) -> Checkpoint:
    """Read a folder: of torch.distributed.checkpoint, with an index, or its files together."""
    if (folder / METADATA).exists():
        return read_distributed(folder)
    indexes: list[Place] = sorted(folder.glob("*.index.json"), key=str)
    if indexes:
        chosen = next((i for i in indexes if "safetensors" in i.name), indexes[0])
        return read_index(folder, chosen)
    files: list[Place] = sorted(
        (p for p in folder.iterdir() if p.suffix.lower() in READERS), key=str
    )
    files = [p for p in files if not BESIDE.fullmatch(p.name)]
    safe = [p for p in files if p.suffix == ".safetensors"]
    left_out = [p.name for p in files if safe and p not in safe]
    parts = {p.name: read_file(p) for p in safe or files}
    if not parts:
        folders: list[Place] = sorted(
            (p for p in folder.iterdir() if p.is_dir() and RANK.search(p.name)), key=str
        )
        parts = {p.name: read_folder(p) for p in folders}
    if not parts:
        raise unreadable(
            folder,
            f"{METADATA}, an index, files that end with {', '.join(READERS)}, or folders of ranks",
            "none of them",
            "name the folder that contains the checkpoint's files",
        )
    found = join_parts(folder, parts)
    if left_out:
        found.notes.append(f"not read, next to safetensors files: {', '.join(left_out)}")
    return found


def join_parts(folder: Place, parts: dict[str, Checkpoint]) -> Checkpoint:
    """Return the files of a folder as one checkpoint; see [Note: Files of a folder]."""
    kinds = [part.kind for part in parts.values()]
    if len(parts) == 1:
        return next(iter(parts.values()))
    names = [name for part in parts.values() for name in (*part.tensors, *part.values)]
    shared = len(names) != len(set(names))
    found = Checkpoint(folder, f"folder of {len(parts)}: {kinds[0]}")
    ranks = [RANK.search(name) for name in parts]
    numbers = [int(match.group(1)) for match in ranks if match]
    if shared and sorted(numbers) != list(range(len(parts))):
        raise unreadable(
            folder,
            "files with different names of tensors, or shards called rank_0, rank_1, …",
            f"{', '.join(parts)} with names in common"[:500],
            "name one of these files, or rename the shards",
        )
    if shared:
        found.notes.append(f"{', '.join(parts)} have names in common: they are shards of ranks")
    for index, part in enumerate(parts.values()):
        suffix = f"@{numbers[index]}" if shared else ""
        for name, tensor in part.tensors.items():
            found.add_tensor(name + suffix, tensor)
        for name, value in part.values.items():
            found.add_value(name + suffix, value)
        found.ties |= part.ties if not shared else {}
        found.notes += part.notes
    return found


def read_index(folder: Place, index: Place) -> Checkpoint:
    """Read the files that an index of transformers names, and check that it names every tensor."""
    where = read_weight_map(index)
    found = Checkpoint(folder, f"folder with {index.name}")
    for file in sorted(set(where.values())):
        if not is_inside(file) or "/" in file or PurePosixPath(file).suffix.lower() not in READERS:
            raise unreadable(index, "names of checkpoint files in this folder", repr(file))
        part = read_file(folder / file)
        listed = {name for name, home in where.items() if home == file}
        missing, extra = sorted(listed - set(part.tensors)), sorted(set(part.tensors) - listed)
        if missing:
            raise unreadable(
                index, f"every tensor of the index in {file}", f"no {', '.join(missing[:3])}"
            )
        if extra:
            found.notes.append(f"{file} has {len(extra)} tensors that the index does not list")
        for name, tensor in part.tensors.items():
            found.add_tensor(name, tensor)
        for name, value in part.values.items():
            found.add_value(name, value)
        found.ties |= part.ties
    return found


def read_weight_map(index: Place) -> dict[str, str]:
    """Return which file has which tensor, by an index of transformers."""
    content = read_json(index)
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise unreadable(index, "a weight_map from names to files", "something else")
    return where


def read_json(path: Place) -> Any:
    """Read a JSON file of limited size."""
    file, size = open_regular(path)
    with file:
        if size > LARGEST_INDEX:
            raise unreadable(path, f"at most {LARGEST_INDEX:,} bytes", f"{size:,} bytes")
        text = file.read(size)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, "JSON", str(error)[:200]) from error


def add_configured_tie(found: Checkpoint, folder: Place) -> None:
    """Note the tie of input and output embeddings that a config.json next to the tensors states."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ArgumentError):
        return
    if not isinstance(config, dict) or config.get("tie_word_embeddings") is not True:
        return
    inputs = [n for n in found.tensors if n.endswith("embed_tokens.weight")]
    if len(inputs) == 1 and not any(n.endswith("lm_head.weight") for n in found.tensors):
        found.ties["lm_head.weight"] = (inputs[0], "tie_word_embeddings in config.json")
