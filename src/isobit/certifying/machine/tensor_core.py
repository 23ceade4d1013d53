"""What wgmma and tcgen05.mma share: operands in shared memory, and the product with its names."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from isobit.certifying.machine.memory import known
from isobit.certifying.machine.mma import matrix_product
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.running.refusals import AddressError, refuse
from isobit.errors import UnsupportedError

# Matrices in shared memory as wgmma and tcgen05.mma describe them: 64 bits -> the address of each element.
#
# A descriptor names a start address, two strides and a swizzle (PTX ISA, "Asynchronous Warpgroup Level Matrix
# Shared Memory Layout" and "tcgen05 Shared memory descriptor"). A line of a tile has 32, 64 or 128 bytes; eight
# lines, one after another, are one pattern of the swizzle. Inside a pattern the 16-byte columns of a line are
# exchanged by an exclusive or with the number of the line, taken from the address itself.
#
# * K-major: a line holds successive k of one row (or column of B). The next eight rows are `stride` bytes on.
# * MN-major: a line holds successive rows of one k. The next eight k are `stride` bytes on, the next line-width
#   of rows `leading` bytes.
#
# Triton emits the three swizzles only. Matrices without a swizzle, with a base offset, or in another mode are
# refused by name.

Addresses = npt.NDArray[np.int64]

# Swizzle fields -> bytes of a line; tcgen05 has three bits (61-63), wgmma two (62-63).
WGMMA_LINES = {1: 128, 2: 64, 3: 32}
TCGEN05_LINES = {2: 128, 4: 64, 6: 32}
# The fields of a descriptor: (lowest bit, number of bits).
START, LEADING, STRIDE = (0, 14), (16, 14), (32, 14)
VERSION, BASE_OFFSET, LEADING_MODE = (46, 3), (49, 3), (52, 1)
KNOWN_BITS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 0b111 << 46 | 0b111 << 61


@dataclass(frozen=True)
class MatrixDescriptor:
    """Where a matrix is in shared memory: bytes of `start`, `leading`, `stride`, and of a line."""

    start: int
    leading: int
    stride: int
    line: int

    def addresses(self, rows: int, depth: int, size: int, k_major: bool) -> Addresses:
        """Return the address of each element: [rows, depth], for elements of `size` bytes.

        Args:
            rows: rows of A, or columns of B, that the instruction reads.
            depth: the k that it reads.
            size: bytes of an element.
            k_major: whether k runs along a line; otherwise rows do.
        """
        row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
        along, across = (k * size, row) if k_major else (row * size, k)
        if k_major and self.start % self.line + depth * size > self.line:
            raise unsupported_descriptor(
                "a matrix descriptor whose k leaves its line", f"start {self.start:#x}"
            )
        address = (
            self.start
            + across // 8 * self.stride
            + across % 8 * self.line
            + along % self.line
            + along // self.line * self.leading
        )
        return swizzled(address, self.line)


def swizzled(address: Addresses, line: int) -> Addresses:
    """Exchange the 16-byte columns of each line: address bits 4.. take an exclusive or with bits 7.."""
    swapped: Addresses = address ^ ((address >> 7 & line // 16 - 1) << 4)
    return swapped


def wgmma_descriptor(bits: int) -> MatrixDescriptor:
    """Decode the descriptor of a wgmma operand (swizzle in bits 62-63)."""
    return decode(bits, "wgmma", WGMMA_LINES.get(bits >> 62 & 3) if not bits >> 61 & 1 else None, 0)


def tcgen05_descriptor(bits: int) -> MatrixDescriptor:
    """Decode the descriptor of a tcgen05.mma operand (swizzle in bits 61-63, 0b001 in 46-48)."""
    return decode(bits, "tcgen05.mma", TCGEN05_LINES.get(bits >> 61 & 7), 1)


def decode(bits: int, opcode: str, line: int | None, version: int) -> MatrixDescriptor:
    """Check the fields that both kinds share, and return the four numbers."""
    received = f"{opcode} with the matrix descriptor {bits & (1 << 64) - 1:#018x}"
    if line is None:
        raise unsupported_descriptor("a swizzle of 32, 64 or 128 bytes", received)
    if field(bits, VERSION) != version:
        raise unsupported_descriptor(f"bits 46-48 of the descriptor to be {version}", received)
    if field(bits, BASE_OFFSET) or field(bits, LEADING_MODE) or bits & ~KNOWN_BITS & (1 << 64) - 1:
        raise unsupported_descriptor(
            "no base offset and no bits set outside the known fields", received
        )
    start, leading, stride = (field(bits, f) << 4 for f in (START, LEADING, STRIDE))
    return MatrixDescriptor(start, leading, stride, line)


def field(bits: int, where: tuple[int, int]) -> int:
    """Return one field of a descriptor."""
    low, width = where
    return bits >> low & (1 << width) - 1


def unsupported_descriptor(expected: str, received: str) -> UnsupportedError:
    """Return the error for a matrix layout that the machine does not read."""
    remedy = "compile the kernel with Triton 3.7, whose layouts of shared memory are known"
    return UnsupportedError(expected=expected, received=received, remedy=remedy)


# Operand types by the bytes of an element, with the k of one instruction (32 bytes).
SIZES = {"f16": 2, "bf16": 2, "tf32": 4}
Tile = tuple[Array, "Names | None"]


def shared_tile(
    machine: State, descriptor: MatrixDescriptor, rows: int, dtype: str, k_major: bool
) -> tuple[Array, Names | None, Array]:
    """Read a matrix [rows, k] behind a descriptor: bits, names, and the pieces of memory that it is in."""
    size = SIZES[dtype]
    index, pieces = elements(descriptor, rows, size, k_major)
    shared, last = machine.shared, 2 * int(index.max()) + 2
    if last > shared.size:
        raise refuse(
            AddressError,
            machine.current,
            expected=f"a matrix inside shared memory ({shared.size} bytes)",
            received=f"byte {last}",
            remedy="check the matrix descriptor, or give the launch the kernel's shared memory",
        )
    bits, made = shared.halves[index], None
    if machine.names and shared.names is not None:
        found, empty = known(shared.names[index])
        if empty:
            machine.fact("the tensor core reads shared memory that was never written")
        made = named(found)
    return joined(bits), made, pieces


@functools.lru_cache(maxsize=256)
def elements(
    descriptor: MatrixDescriptor, rows: int, size: int, k_major: bool
) -> tuple[Array, Array]:
    """Return the halves [rows, k, size / 2] of a matrix, and the pieces of 16 bytes that it is in."""
    addresses = descriptor.addresses(rows, 32 // size, size, k_major)
    return (addresses // 2)[..., None] + np.arange(size // 2), np.unique(addresses // 16)


def joined(halves: Array) -> Array:
    """Return elements from their halves [..., 1 or 2]."""
    if halves.shape[-1] == 1:
        return halves[..., 0]
    whole: Array = halves[..., 0] | halves[..., 1].astype(np.uint32) << np.uint32(16)
    return whole


def named(halves: Names) -> Names:
    """Return the names of elements from those of their halves [..., 1 or 2]."""
    return (
        nm.value16(halves[..., 0])
        if halves.shape[-1] == 1
        else nm.join(halves[..., 0], halves[..., 1])
    )


def multiply(machine: State, a: Tile, b: Tile, c: Tile, dtype: str) -> Tile:
    """Return c + a @ b.T: a [..., m, k], b [..., n, k], c [..., m, n] as uint32 bits of fp32."""
    operands = a[0], b[0], c[0].view(np.float32)
    names = None
    if a[1] is not None and b[1] is not None and c[1] is not None:
        names = a[1], b[1], c[1]
    total, made = matrix_product(machine, operands, names, (dtype, dtype))
    return total.view(np.uint32), made


def zeros(machine: State, shape: tuple[int, ...]) -> Tile:
    """Return an accumulator of zeros."""
    named_zero = np.full(shape, nm.constant_float(0.0)) if machine.names else None
    return np.zeros(shape, np.uint32), named_zero
