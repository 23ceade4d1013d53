"""Global buffers and shared memory: bytes, and one name per 16-bit half. See [Note: halves]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobit.certifying.machine.registers import unknown_names
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names, byte_of

UNWRITTEN = np.uint64(0)  # a half of shared memory that nothing has written


@dataclass(frozen=True)
class Pointer:
    """A pointer into a buffer, `offset` bytes after its start: two views of one storage."""

    buffer: Buffer
    offset: int


class Buffer:
    """An array in global memory: an argument of a kernel that is a pointer.

    Args:
        data: a contiguous array; its bytes are written in place. bf16 is given as uint16.
        names: one name per 16-bit half. Without them, elements are inputs called `label`, or
            constants if the buffer is concrete.
        label: what the inputs are called; the parameter's name if it is not given.
        concrete: whether elements are plain numbers that decide addresses and branches (block
            tables, lengths, token ids). By default signed integers and booleans are; then a
            certificate holds for these numbers only.
        integers: which halves are of an integer tensor; see [Note: integer bits].
    """

    def __init__(
        self,
        data: Array,
        names: Names | None = None,
        label: str = "",
        concrete: bool | None = None,
        integers: Array | None = None,
    ) -> None:
        if not data.flags.c_contiguous:
            raise ValueError("a Buffer needs a contiguous array")
        self.data, self.names, self.label = data, names, label
        self.concrete = data.dtype.kind in "ib" if concrete is None else concrete
        raw = data.reshape(-1).view(np.uint8)
        # 16-bit access needs an even number of bytes; an odd array is copied back after a run
        self.padded = None if raw.size % 2 == 0 else np.append(raw, np.uint8(0))
        self.bytes = raw if self.padded is None else self.padded
        self.halves = self.bytes.view(np.uint16)
        self.size = raw.size
        self.base = 0
        self.integers = integers
        self.changed = False  # whether a kernel stored to it

    def prepare(self, label: str) -> None:
        """Name the elements as inputs, if they have no names yet."""
        self.label = self.label or label
        if self.names is None and not self.concrete:
            bits = 8 * self.data.dtype.itemsize
            self.names = nm.inputs(self.label, self.data.size, bits)

    def named(self) -> Names:
        """Return the halves' names; a concrete buffer is constants."""
        if self.names is None:
            self.names = nm.fixed_half(self.halves)
        return self.names

    def finish(self) -> None:
        """Write the padded copy back."""
        if self.padded is not None:
            self.data.reshape(-1).view(np.uint8)[:] = self.padded[:-1]

    def element_names(self) -> Names:
        """Return one name per element, in the shape of the data.

        Of 16 and 32 bits: the name of the value. Of 8 bits: of the byte. Of 64 bits: of the pair.
        """
        halves, shape = self.named(), self.data.shape
        size = self.data.dtype.itemsize
        if size == 1:
            both = np.stack([byte_of(halves, 0), byte_of(halves, 1)], -1).reshape(-1)
            return both[: self.size].reshape(shape)
        if size == 2:
            return nm.value16(halves).reshape(shape)
        words = nm.join(halves[0::2], halves[1::2])
        return (words if size == 4 else nm.pair(words[0::2], words[1::2])).reshape(shape)


class Shared(Buffer):
    """The shared memory of one CTA."""

    def __init__(self, size: int, names: bool) -> None:
        super().__init__(np.zeros(size + size % 2, np.uint8), concrete=True)
        self.names = np.zeros(self.halves.size, np.uint64) if names else None
        self.tracked = names


def read(buffer: Buffer, at: Array, size: int) -> tuple[Array, Names | None]:
    """Return halves [n, size / 2] at byte offsets [n], and their names if any depends on data."""
    index = (at >> 1)[:, None] + np.arange(max(1, size // 2))
    if buffer.names is None:
        return buffer.halves[index], None
    found = buffer.names[index]
    return buffer.halves[index], (None if (found >= nm.FIXED).all() else found)


def known(found: Names) -> tuple[Names, bool]:
    """Give halves that were never written names of their own; tell whether there were any."""
    empty = found == UNWRITTEN
    if not empty.any():
        return found, False
    found = found.copy()
    found[empty] = unknown_names(int(empty.sum()))
    return found, True
