"""What wgmma and tcgen05.mma share: operands in shared memory, and the product with its names."""

from __future__ import annotations

import functools

import numpy as np

from isobit.certifying.machine.matrix_descriptors import MatrixDescriptor
from isobit.certifying.machine.memory import known
from isobit.certifying.machine.mma import matrix_product
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.running.refusals import AddressError, refuse

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
