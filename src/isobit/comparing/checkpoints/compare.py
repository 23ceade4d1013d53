"""Compare two checkpoints tensor by tensor, bit for bit, in memory that does not depend on their size.

Tensors are compared in parallel by threads: reading, comparing and hashing release Python's lock. Bytes are compared
first; what is equal is hashed only if digests are asked for, once for both sides. See [Note: memory of a comparison].
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from blake3 import blake3

from isobit import bits
from isobit.comparing.checkpoints.names import Pair, Piece, Side, key_of, match_names
from isobit.comparing.checkpoints.readers import read_checkpoint
from isobit.comparing.checkpoints.records import Comparison, TensorResult, Tie, ValueResult
from isobit.comparing.checkpoints.streams import UNIT, Stream, open_side, same_bytes
from isobit.comparing.tensor_files import Checkpoint, Stored
from isobit.foundation.addresses import place_of
from isobit.foundation.records import Difference

THREADS = 8  # at most, unless asked for


def compare_checkpoints(
    left: Path | str,
    right: Path | str,
    *,
    common_only: bool = False,
    digests: bool = True,
    threads: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor, bit for bit.

    Args:
        left: A file or folder that `read_checkpoint` can read, or an address such as s3://bucket/prefix.
        right: The same.
        common_only: Do not let names that only one of them has decide.
        digests: Compute digests of every tensor; without them equal checkpoints are compared at the speed of memory.
        threads: Number of tensors that are compared at a time; by default that of the processors, at most 8.
        progress: Called after each tensor with its number, the number of all, and its name.

    Returns:
        The comparison: equal only if every tensor, number and text is the same.

    Raises:
        ArgumentError: If one of them cannot be read.
        OSError: If a file is not there or is not a regular file.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.pt"
        >>> torch.save({"weight": torch.ones(2, 2)}, file)
        >>> found = compare_checkpoints(file, file)
        >>> found.equal, len(found.tensors), found.elements, found.bytes
        (True, 1, 4, 16)
    """
    a, b = (read_checkpoint(place_of(path)) for path in (left, right))
    matching = match_names(shapes_of(a), shapes_of(b))
    results = []
    workers = threads or min(THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers) as pool:
        try:
            compared = pool.map(
                partial(compare_pair, left=a, right=b, digests=digests), matching.pairs
            )
            for number, one in enumerate(compared, 1):
                results.append(one)
                if progress is not None:
                    progress(number, len(matching.pairs), one.name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    ties = [
        *find_ties(a, b, matching.only_left),
        *find_ties(b, a, matching.only_right),
    ]
    tied = {tie.name for tie in ties}
    values, only_a, only_b, differ = compare_values(a, b)
    return Comparison(
        (str(left), str(right)),
        (a.kind, b.kind),
        tuple(results),
        tuple(n for n in (*matching.only_left, *only_a) if n not in tied),
        tuple(n for n in (*matching.only_right, *only_b) if n not in tied),
        tuple(ties),
        values,
        differ,
        (
            *(f"A: {note}" for note in a.notes),
            *(f"B: {note}" for note in b.notes),
            *matching.notes,
        ),
        common_only,
    )


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors."""
    return {name: tensor.shape for name, tensor in checkpoint.tensors.items()}


def compare_pair(
    pair: Pair, left: Checkpoint, right: Checkpoint, digests: bool = True
) -> TensorResult:
    """Compare one tensor, a unit of bytes at a time."""
    (dtype, shape, a), (other, others, b) = (
        open_side(left, pair.left),
        open_side(right, pair.right),
    )
    found = Tally(dtype, shape)
    try:
        if dtype != other or shape != others:
            said = bits.first_difference(
                torch.empty(shape, dtype=dtype, device="meta"),
                torch.empty(others, dtype=other, device="meta"),
            )
            hashes = digest_of(dtype, shape, a), digest_of(other, others, b)
            largest = largest_of(dtype, shape, a, other, b) if shape == others else None
        else:
            hashes = compare_streams(found, a, b, digests)
            said, largest = found.difference, found.largest
    finally:
        a.close()
        b.close()
    return TensorResult(
        pair.name,
        str(pair.left),
        str(pair.right),
        pair.how,
        str(dtype).removeprefix("torch."),
        tuple(shape),
        math.prod(shape),
        math.prod(shape) * dtype.itemsize,
        hashes,
        said,
        largest,
    )


class Tally:
    """What is known so far about the difference of two tensors of one dtype and shape."""

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        """Know nothing yet."""
        self.dtype, self.shape = dtype, shape
        self.count = 0
        self.first: tuple[int, Difference] | None = None
        self.largest: float | None = None

    def add(self, position: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count the elements of a unit that differ; `position` is its first byte."""
        found = bits.first_difference(a, b)
        if found is None:
            return
        self.count += found.count or 0
        if self.first is None and found.index is not None:
            self.first = (position // self.dtype.itemsize + found.index[0], found)
        apart = largest_difference(a, b)
        if apart is not None:
            self.largest = max(self.largest or 0.0, apart)

    @property
    def difference(self) -> Difference | None:
        """The first difference in the whole tensor, and how many there are; None if equal."""
        if self.first is None:
            return None
        at, found = self.first
        where = torch.unravel_index(torch.tensor(at), self.shape) if self.shape else ()
        index = tuple(int(i) for i in where) + (found.index or ())[1:]  # two parts if complex
        total = math.prod(self.shape) * (2 if self.dtype.is_complex else 1)
        return Difference("bits", found.left, found.right, index, found.ulps, self.count, total)


def compare_streams(found: Tally, a: Stream, b: Stream, digests: bool) -> tuple[str, str]:
    """Compare the bytes of two tensors of one dtype and shape, and return their digests, "" if not asked for."""
    head = f"{found.dtype}{list(found.shape)}".encode()
    mine = blake3(head) if digests else None
    theirs: blake3 | None = None
    size, position = math.prod(found.shape) * found.dtype.itemsize, 0
    while position < size:
        left, count = a.at(position, min(UNIT, size - position))
        right, count = b.at(position, count)
        if not same_bytes(left, right, count):
            if mine is not None and theirs is None:
                theirs = mine.copy()  # until here both sides have the same bytes
            found.add(position, *(as_tensor(x, count, found.dtype) for x in (left, right)))
        if mine is not None:
            mine.update(memory(left, count))
        if theirs is not None:
            theirs.update(memory(right, count))
        position += count
    if mine is None:
        return "", ""
    return mine.hexdigest()[:32], (theirs or mine).hexdigest()[:32]


def memory(address: int, count: int) -> memoryview:
    """Return bytes at an address without a copy."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def as_tensor(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return elements at an address as a tensor of one dimension; a copy, aligned for its dtype."""
    return torch.frombuffer(bytearray(memory(address, count)), dtype=torch.uint8).view(dtype)


def digest_of(dtype: torch.dtype, shape: torch.Size, stream: Stream) -> str:
    """Return the digest of a tensor: that of isobit.bits.digest."""
    hasher, size, position = (
        blake3(f"{dtype}{list(shape)}".encode()),
        math.prod(shape) * dtype.itemsize,
        0,
    )
    while position < size:
        address, count = stream.at(position, min(UNIT, size - position))
        hasher.update(memory(address, count))
        position += count
    return hasher.hexdigest()[:32]


def largest_of(
    dtype: torch.dtype, shape: torch.Size, a: Stream, other: torch.dtype, b: Stream
) -> float | None:
    """Return the largest |difference| of two tensors of one shape and two dtypes."""
    largest: float | None = None
    total, done = math.prod(shape), 0
    while done < total:
        few = min(UNIT // max(dtype.itemsize, other.itemsize), total - done)
        sides = [(a, dtype), (b, other)]
        got = [s.at(done * d.itemsize, few * d.itemsize) for s, d in sides]
        few = min(n // d.itemsize for (_, n), (_, d) in zip(got, sides, strict=True))
        x, y = (
            as_tensor(at, few * d.itemsize, d) for (at, _), (_, d) in zip(got, sides, strict=True)
        )
        apart = largest_difference(x, y)
        if apart is not None:
            largest = max(largest or 0.0, apart)
        done += few
    return largest


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest |difference| of elements that are finite on both sides, in fp64."""
    if torch.float4_e2m1fn_x2 in (a.dtype, b.dtype):
        return None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    apart = (a.to(wide) - b.to(wide)).abs()
    finite = apart[torch.isfinite(apart)]
    return float(finite.max()) if finite.numel() else None


def same_tensor(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Return whether two tensors of a checkpoint are equal bit for bit."""
    sides = (Side((Piece(one),)), Side((Piece(other),)))
    (dtype, shape, a), (its, others, b) = (open_side(checkpoint, side) for side in sides)
    found = Tally(dtype, shape)
    try:
        if dtype == its and shape == others:
            compare_streams(found, a, b, digests=False)
        return dtype == its and shape == others and found.first is None
    finally:
        a.close()
        b.close()


def find_ties(having: Checkpoint, lacking: Checkpoint, names: list[str]) -> list[Tie]:
    """Return which of the names are absent from the other checkpoint because they are tied.

    A tie is shown by the file: two names of one storage, metadata, or a configuration. Equal bits alone do not show
    one, since two tensors of zeros are equal too; but without them there is no tie.
    """
    found = []
    for name in names:
        tensor = having.tensors[name]
        for kept, shown_by in tie_candidates(having, lacking, name, tensor):
            if kept in having.tensors and same_tensor(having, name, kept):
                found.append(Tie(name, kept, shown_by))
                break
    return found


def tie_candidates(
    having: Checkpoint, lacking: Checkpoint, name: str, tensor: Stored
) -> Iterable[tuple[str, str]]:
    """Return names that the other checkpoint has and that may be tied to this one, with what shows it."""
    keys = {key_of(n, ("model", "state_dict")) for n in lacking.tensors}
    if tensor.memory:
        for other, entry in having.tensors.items():
            same = entry.memory == tensor.memory and other != name
            if same and key_of(other, ("model", "state_dict")) in keys:
                yield other, f"one storage of both names in {having.path.name}"
    for absent, (kept, shown_by) in lacking.ties.items():
        if key_of(absent, ("model", "state_dict")) == key_of(name, ("model", "state_dict")):
            for other in having.tensors:
                if key_of(other, ("model", "state_dict")) == key_of(kept, ("model", "state_dict")):
                    yield other, shown_by


def compare_values(
    a: Checkpoint, b: Checkpoint
) -> tuple[int, list[str], list[str], tuple[ValueResult, ...]]:
    """Compare numbers and texts by name: how many both have, which only one has, and which differ."""
    both = sorted(a.values.keys() & b.values.keys())
    differ = tuple(
        ValueResult(n, a.values[n], b.values[n]) for n in both if a.values[n] != b.values[n]
    )
    only = [sorted(x.values.keys() - y.values.keys()) for x, y in ((a, b), (b, a))]
    return len(both), only[0], only[1], differ
