"""The bytes of a tensor in row-major order, a few at a time, wherever they are stored.

[Note: memory of a comparison]
Two tensors are compared UNIT bytes at a time: units of this size are still in the processor's cache when they are
compared after they were read. A stream returns the address of its next bytes: of a buffer into which it reads a file,
of the memory that a file of torch.save is mapped to, or of a block that was put together from shards. A block has rows,
or if a row is larger than BLOCK bytes, rows of a row; it is read through a unit, or one row of a shard if that is
larger. So a thread has at most two units, two blocks of BLOCK bytes with what they are read through, and no whole
tensor; pages of a mapped file belong to the system, which may drop them. Buffers are allocated once, since memory that
is freed and allocated again may stay with the process. Storage at an address is read in pieces of BLOCK bytes. Shards
that are stored in another order than that of rows are loaded whole.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import math
import os
from pathlib import Path
from typing import BinaryIO, Protocol

import torch

from isobit.comparing.checkpoints.names import Piece, Side
from isobit.comparing.checkpoints.readers import read_segment
from isobit.comparing.tensor_files import (
    Checkpoint,
    Run,
    Segment,
    Stored,
    cut_rows,
    open_regular,
    unreadable,
)
from isobit.foundation.addresses import Address

UNIT = 1 << 18  # bytes that are compared at a time; a multiple of every element size
BLOCK = 1 << 23  # bytes of rows that are put together, or fetched, at a time

# Elements are moved as bits: a dtype by the size of an element.
BITS = dict(
    zip(
        (1, 2, 4, 8, 16),
        (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128),
        strict=True,
    )
)

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


def same_bytes(left: int, right: int, count: int) -> bool:
    """Return whether the bytes at two addresses are equal."""
    return bool(_memcmp(left, right, count) == 0)


class Stream(Protocol):
    """The bytes of a tensor in row-major order."""

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Return the address of the bytes from `position` on, and how many are there: at most `wanted`.

        They stay there until the next call.
        """

    def close(self) -> None:
        """Close what is open."""


class FileStream:
    """Bytes of files, read into one buffer."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        """Read these segments, one after the other."""
        self.segments = [one for one in segments if one.length]
        self.starts = [0, *itertools.accumulate(one.length for one in self.segments)]
        self.buffer = bytearray(UNIT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.file: BinaryIO | None = None
        self.path: object = None

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Read the next bytes of one segment."""
        number = bisect.bisect_right(self.starts, position) - 1
        segment, inside = self.segments[number], position - self.starts[number]
        if self.path != segment.path:
            self.close()
            self.file, _ = open_regular(segment.path)
            self.path = segment.path
        assert self.file is not None
        count = min(wanted, UNIT, segment.length - inside)
        done = 0
        while done < count:
            into = [memoryview(self.buffer)[done:count]]
            read = os.preadv(self.file.fileno(), into, segment.first + inside + done)
            if not read:
                raise unreadable(
                    segment.path, f"{segment.length:,} bytes", "a file that has shrunk"
                )
            done += read
        return self.address, count

    def close(self) -> None:
        """Close the file that is open."""
        if self.file is not None:
            self.file.close()
        self.file = self.path = None


class AddressStream(FileStream):
    """Bytes of object storage, fetched a block at a time."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        """Fetch these segments, one after the other."""
        super().__init__(segments)
        self.block, self.first = bytearray(0), 0

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Return bytes of the block that was fetched; fetch the next one if they are not in it."""
        if not self.first <= position < self.first + len(self.block):
            number = bisect.bisect_right(self.starts, position) - 1
            segment, inside = self.segments[number], position - self.starts[number]
            assert isinstance(segment.path, Address)
            count, start = min(BLOCK, segment.length - inside), segment.first + inside
            self.block = bytearray(segment.path.read(start, start + count))
            if len(self.block) != count:
                raise unreadable(segment.path, f"{segment.length:,} bytes", "fewer")
            self.first = position
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.block))
        skip = position - self.first
        return self.address + skip, min(wanted, len(self.block) - skip)


class MemoryStream:
    """Bytes of a contiguous tensor in memory, or in a mapped file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Keep the tensor, so that its memory stays."""
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Return the address itself: nothing is copied."""
        return self.tensor.data_ptr() + position, min(wanted, self.size - position)

    def close(self) -> None:
        """Do nothing."""


class BoolStream:
    """Bytes of bools, each of which must be 0 or 1: torch reads others as it likes."""

    def __init__(self, stream: Stream, path: Path | Address, side: Side) -> None:
        """Check what another stream reads."""
        self.stream, self.path, self.side = stream, path, side

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Return the address of the next bytes, which are bools."""
        address, count = self.stream.at(position, wanted)
        if ctypes.string_at(address, count).translate(None, b"\0\1"):
            raise unreadable(self.path, f"zeros and ones in {self.side}", "other bytes")
        return address, count

    def close(self) -> None:
        """Close what is open."""
        self.stream.close()


class BlockStream:
    """Bytes that are put together from pieces, a block at a time."""

    def __init__(self, pieces: list[tuple[Stored, Piece]], dim: int, shape: torch.Size) -> None:
        """Put pieces together along `dim`; `shape` is that of the result, with at least one dimension."""
        self.pieces, self.dim, self.shape = pieces, dim, shape
        size = pieces[0][0].dtype.itemsize
        # The dimension that is cut: the first whose elements are not larger than a block.
        widths = [math.prod(shape[axis + 1 :]) * size for axis in range(len(shape))]
        self.axis = next(axis for axis, width in enumerate(widths) if width <= max(BLOCK, size))
        self.width = widths[self.axis]
        self.height = min(max(1, BLOCK // self.width), shape[self.axis])
        self.block = torch.empty((self.height, *shape[self.axis + 1 :]), dtype=BITS[size])
        self.first = self.last = 0  # bytes of the result that are in the block
        self.through = bytearray(UNIT)
        self.loaded: dict[int, torch.Tensor] = {}

    def at(self, position: int, wanted: int) -> tuple[int, int]:
        """Return the address in the block; put the next block together if the bytes are not in it."""
        if not self.first <= position < self.last:
            rows = self.shape[self.axis]
            before, row = left, _ = divmod(position // self.width, rows)
            stop = min(row + self.height, rows)
            lead: tuple[int, ...] = ()
            for size in reversed(self.shape[: self.axis]):
                left, index = divmod(left, size)
                lead = (index, *lead)
            self.fill(lead, row, stop)
            self.first = (before * rows + row) * self.width
            self.last = (before * rows + stop) * self.width
        return self.block.data_ptr() + position - self.first, min(wanted, self.last - position)

    def fill(self, lead: tuple[int, ...], start: int, stop: int) -> None:
        """Put a block together: at indices of the first dimensions, elements of the one that is cut."""
        block, begin = self.block[: stop - start], 0
        for at, (stored, piece) in enumerate(self.pieces):
            end = begin + size_of(stored, piece, self.dim)
            if self.dim > self.axis:
                part = block.narrow(self.dim - self.axis, begin, end - begin)
                self.copy(at, lead, start, stop, part)
            elif self.dim == self.axis and max(start, begin) < min(stop, end):
                first, last = max(start, begin), min(stop, end)
                self.copy(
                    at, lead, first - begin, last - begin, block[first - start : last - start]
                )
            elif self.dim < self.axis and begin <= lead[self.dim] < end:
                inside = (*lead[: self.dim], lead[self.dim] - begin, *lead[self.dim + 1 :])
                self.copy(at, inside, start, stop, block)
            elif self.dim == 0:
                self.loaded.pop(at, None)  # what could only be loaded whole is not needed again
            begin = end

    def copy(
        self, at: int, lead: tuple[int, ...], start: int, stop: int, out: torch.Tensor
    ) -> None:
        """Copy a part of one piece into a part of the block."""
        stored, piece = self.pieces[at]
        begin, cut = piece.start or 0, piece.dim - self.axis
        if cut == 0:
            start, stop = start + begin, stop + begin
        elif cut < 0:
            lead = (*lead[: piece.dim], lead[piece.dim] + begin, *lead[piece.dim + 1 :])
        runs = None if at in self.loaded else runs_of(stored, lead, start, stop)
        if runs is None:
            if at not in self.loaded:
                self.loaded[at] = stored.load()
            found = plain(self.loaded[at][lead][start:stop])
            found = found if cut <= 0 else found.narrow(cut, begin, out.shape[cut])
            out.copy_(found.view(out.dtype))
            return
        for run in runs:
            take, place = [slice(None)] * len(run.place), list(run.place)
            if cut > 0:
                first = max(run.place[cut].start, begin)
                last = min(run.place[cut].stop, begin + out.shape[cut])
                if first >= last:
                    continue
                take[cut] = slice(first - run.place[cut].start, last - run.place[cut].start)
                place[cut] = slice(first - begin, last - begin)
            self.copy_run(run, tuple(take), out[tuple(place)])

    def copy_run(self, run: Run, take: tuple[slice, ...], out: torch.Tensor) -> None:
        """Copy what `take` selects of a run, as many rows at a time as a unit has."""
        rows, *rest = run.shape
        width = run.segment.length // rows
        is_remote = isinstance(run.segment.path, Address)
        height = rows if is_remote else max(1, UNIT // width)
        if len(self.through) < height * width:
            self.through = bytearray(height * width)
        for row in range(0, rows, height):
            count = min(height, rows - row)
            first = run.segment.first + row * width
            read_segment(Segment(run.segment.path, first, count * width), self.through)
            found = torch.frombuffer(self.through, dtype=torch.uint8, count=count * width)
            found = found.view(out.dtype).reshape(count, *rest)
            out[row : row + count].copy_(found[take])

    def close(self) -> None:
        """Free what was loaded."""
        self.loaded.clear()


def runs_of(stored: Stored, lead: tuple[int, ...], start: int, stop: int) -> list[Run] | None:
    """Return where a part of a tensor is stored, also of one whose bytes are all in row-major order."""
    found = stored.runs(lead, start, stop)
    segments = None if found is not None else stored.segments()
    if segments is None or len(segments) != 1:
        return found
    count, rest = stop - start, stored.shape[len(lead) + 1 :]
    segment = cut_rows(segments[0], stored.dtype, stored.shape, (*lead, start), count)
    place = tuple(slice(0, n) for n in (count, *rest))
    return [Run(segment, place)] if segment.length else []


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: not to be conjugated or negated when it is read."""
    return tensor.detach().resolve_conj().resolve_neg()


def size_of(stored: Stored, piece: Piece, dim: int) -> int:
    """Return the size of a piece in a dimension."""
    if piece.start is not None and piece.stop is not None and piece.dim == dim:
        return piece.stop - piece.start
    return stored.shape[dim]


def open_side(checkpoint: Checkpoint, side: Side) -> tuple[torch.dtype, torch.Size, Stream]:
    """Return dtype, shape and bytes of one side of a comparison; nothing but places is read yet."""
    pieces = [(checkpoint.tensors[piece.name], piece) for piece in side.pieces]
    dtype = pieces[0][0].dtype
    if len({stored.dtype for stored, _ in pieces}) > 1:  # as bits they cannot be put together
        raise unreadable(checkpoint.path, "shards of one dtype", f"several for {side}")
    shape = shape_of(checkpoint, side, pieces)
    if math.prod(shape) == 0:
        return dtype, shape, MemoryStream(torch.empty(shape, dtype=dtype))
    stream = stream_of(side, pieces, shape)
    return (
        dtype,
        shape,
        BoolStream(stream, checkpoint.path, side) if dtype is torch.bool else stream,
    )


def stream_of(side: Side, pieces: list[tuple[Stored, Piece]], shape: torch.Size) -> Stream:
    """Return the bytes of pieces that fit together."""
    found = segments_of(side, pieces)
    if found is not None:
        remote = any(isinstance(one.path, Address) for one in found)
        return (AddressStream if remote else FileStream)(found)
    stored, piece = pieces[0]
    if not shape or (len(pieces) == 1 and runs_of(stored, (), 0, 0) is None):
        tensor = stored.load()
        if piece.start is not None and piece.stop is not None:
            tensor = tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            return MemoryStream(tensor.detach())
        if not shape:
            return MemoryStream(plain(tensor).contiguous())
    return BlockStream(pieces, side.dim, shape)


def shape_of(checkpoint: Checkpoint, side: Side, pieces: list[tuple[Stored, Piece]]) -> torch.Size:
    """Return the shape of a side; raise if its pieces do not fit together."""
    shapes = []
    for stored, piece in pieces:
        shape = list(stored.shape)
        if piece.start is not None and piece.stop is not None:
            shape[piece.dim] = piece.stop - piece.start
        shapes.append(shape)
    found = list(shapes[0])
    if len(shapes) > 1:
        rests = {tuple(s[: side.dim] + s[side.dim + 1 :]) for s in shapes}
        if len(rests) > 1 or len(found) <= side.dim:
            raise unreadable(checkpoint.path, f"shards that fit together for {side}", str(shapes))
        found[side.dim] = sum(s[side.dim] for s in shapes)
    return torch.Size(found)


def segments_of(side: Side, pieces: list[tuple[Stored, Piece]]) -> tuple[Segment, ...] | None:
    """Return where a side's bytes are in row-major order; None if something has to be rearranged or checked."""
    if len(pieces) > 1 and side.dim:
        return None
    found: list[Segment] = []
    for stored, piece in pieces:
        segments = stored.segments()
        if segments is None or (piece.start is not None and piece.dim):
            return None
        if piece.start is not None and piece.stop is not None:
            width = math.prod(stored.shape[1:]) * stored.dtype.itemsize
            segments = cut_segments(segments, piece.start * width, piece.stop * width)
        found += segments
    return tuple(found)


def cut_segments(segments: tuple[Segment, ...], first: int, last: int) -> tuple[Segment, ...]:
    """Return the bytes from `first` up to `last` of segments."""
    found, begin = [], 0
    for one in segments:
        low, high = max(first, begin), min(last, begin + one.length)
        if low < high:
            found.append(Segment(one.path, one.first + low - begin, high - low))
        begin += one.length
    return tuple(found)
