"""Tensor memory of sm_100: 128 lanes of 512 columns of 32 bits, with a name for each 16-bit half.

An address is `lane << 16 | column` (PTX ISA, "Tensor Memory Addressing"). `tcgen05.alloc` hands out columns.
A warp reaches only the 32 lanes of its place in its warp group: warp w the lanes 32 * (w % 4) and following.

Where a matrix of an mma is (PTX ISA, "Data path layout organization"): with 128 rows, row i is lane i. With
64 rows, row i is lane 32 * (i // 16) + i % 16: half of each warp's lanes, from lane 0 or from lane 16.
A matrix of 16-bit values has two in a column, the even k in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isobit.errors import UnsupportedError

LANES, COLUMNS = 128, 512
BLOCK = 16  # Lanes are tracked in blocks of 16: no instruction here uses fewer.
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cells:
    """A part of tensor memory: a set of blocks of 16 lanes (a bit mask), and a range of columns."""

    blocks: int
    first: int
    last: int
    warp: int = -1  # Of a load or store: the warp that executes it.

    def overlaps(self, other: Cells) -> bool:
        """Whether both have a cell in common."""
        return (
            bool(self.blocks & other.blocks) and self.first < other.last and other.first < self.last
        )


class TensorMemory:
    """The cells of one CTA, and which columns are allocated."""

    def __init__(self, names: bool) -> None:
        self.bits = np.zeros((LANES, COLUMNS), np.uint32)
        self.names = np.zeros((LANES, COLUMNS, 2), np.uint64) if names else None
        self.allocated: dict[int, int] = {}  # first column -> columns

    def allocate(self, columns: int) -> int:
        """Reserve columns and return their address: the lowest free range."""
        if columns < 32 or columns > COLUMNS or columns & columns - 1:
            raise unsupported_tensor_memory(
                "tcgen05.alloc of 32, 64, 128, 256 or 512 columns", f"{columns} columns"
            )
        for first in range(0, COLUMNS - columns + 1, columns):
            if all(first + columns <= f or f + n <= first for f, n in self.allocated.items()):
                self.allocated[first] = columns
                return first
        raise unsupported_tensor_memory(
            "free columns of tensor memory", f"tcgen05.alloc of {columns} with none free"
        )

    def free(self, address: int, columns: int) -> None:
        """Return columns that were allocated."""
        if self.allocated.get(address) != columns:
            received = f"tcgen05.dealloc of {columns} columns at {address:#x}"
            raise unsupported_tensor_memory(
                "tcgen05.dealloc of what tcgen05.alloc returned", received
            )
        del self.allocated[address]

    def finish(self) -> None:
        """Refuse a CTA that ends without returning its columns: the next one would wait for them."""
        if self.allocated:
            raise unsupported_tensor_memory(
                "tcgen05.dealloc of all columns before a CTA ends", f"{self.allocated} left"
            )

    def check_allocated(self, columns: Indices, what: str) -> None:
        """Refuse an access to columns that nobody allocated."""
        free = np.ones(COLUMNS, bool)
        for first, number in self.allocated.items():
            free[first : first + number] = False
        inside = (columns >= 0) & (columns < COLUMNS)
        if not inside.all() or free[columns].any():
            bad = int(columns[~inside][0] if not inside.all() else columns[free[columns]][0])
            raise unsupported_tensor_memory(
                "an access to allocated columns of tensor memory", f"{what} at column {bad}"
            )


def matrix_cells(address: int, rows: int, columns: int) -> tuple[Indices, Indices, Cells]:
    """Return the lane of each row and each column's number, for a matrix of an mma at an address."""
    lane, first = address >> 16, address & 0xFFFF
    row = np.arange(rows)
    if rows == 128 and lane == 0:
        lanes, blocks = row, 0xFF
    elif rows == 64 and lane in (0, BLOCK):
        lanes = lane + row // BLOCK * 32 + row % BLOCK
        blocks = 0x55 << lane // BLOCK
    else:
        raise unsupported_tensor_memory(
            "a matrix of 128 rows at lane 0, or of 64 at lane 0 or 16", f"{rows} at {lane}"
        )
    return lanes, first + np.arange(columns), Cells(blocks, first, first + columns)


def message_cells(
    shape: str, count: int, addresses: Indices, split: int | None
) -> tuple[Indices, Indices, list[Cells]]:
    """Return lane and column of each register of a `tcgen05.ld` or `.st`: [threads, count] each.

    Args:
        shape: 32x32b, or 16x32bx2 (16 lanes, and again `split` columns on for threads 16 to 31).
        count: registers per thread, the N of .xN.
        addresses: the address operand of each thread; one per warp.
        split: the immediate of 16x32bx2.
    """
    thread = np.arange(len(addresses))
    lane, column = addresses >> 16, addresses & 0xFFFF
    warp = thread // 32
    if (addresses.reshape(-1, 32) != addresses.reshape(-1, 32)[:, :1]).any():
        raise unsupported_tensor_memory(
            "one address per warp in tcgen05.ld and tcgen05.st", "threads of a warp that differ"
        )
    own = lane - warp % 4 * 32
    if shape == "32x32b" and split is None and not own.any():
        lanes, start = lane + thread % 32, column
        parts = [
            Cells(0b11 << lane[t] // BLOCK, column[t], column[t] + count, warp[t])
            for t in thread[::32]
        ]
    elif shape == "16x32bx2" and split is not None and np.isin(own, (0, BLOCK)).all():
        lanes, start = lane + thread % 16, column + np.where(thread % 32 < 16, 0, split)
        parts = [
            Cells(1 << lane[t] // BLOCK, start[t], start[t] + count, warp[t])
            for t in np.concatenate([thread[::32], thread[16::32]])
        ]
    else:
        received = f"shape {shape} at lane {int(lane[0])} in warp {int(warp[0])}"
        raise unsupported_tensor_memory(
            "tcgen05.ld or .st of 32x32b or 16x32bx2 in the warp's own lanes", received
        )
    repeat = np.arange(count)
    return np.broadcast_to(lanes[:, None], (len(thread), count)), start[:, None] + repeat, parts


def unsupported_tensor_memory(expected: str, received: str) -> UnsupportedError:
    """Return the error for a use of tensor memory that the machine does not support."""
    remedy = "compile the kernel with Triton 3.7, or use a tile that does not need this instruction"
    return UnsupportedError(expected=expected, received=received, remedy=remedy)
