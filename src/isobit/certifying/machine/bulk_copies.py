"""Bulk copies of boxes of a tensor (TMA), and the instructions that make their tensor maps in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.certifying.machine.asynchronous import PIECE, Asynchronous, Work
from isobit.certifying.machine.barrier_objects import barriers, issuing_thread, value_at
from isobit.certifying.machine.mbarriers import Arrival
from isobit.certifying.machine.memory import Buffer, known
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.races import Access
from isobit.certifying.machine.state import State
from isobit.certifying.machine.tensor_core import swizzled
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx import Address, Immediate, Instruction, Operand, Register, Vector
from isobit.certifying.running.refusals import AddressError, OpcodeError, RaceError, refuse, unknown

# Tensor maps: how a bulk copy (TMA) finds the elements of a box in a tensor, and lays them into shared memory.
#
# A map has the address, sizes and strides of a tensor, the sizes of a box, and a swizzle. Dimension 0 is the one
# whose elements are side by side. Elements of a box that are outside the tensor are zeros when it is copied to
# shared memory, and are left out when it is copied from there (PTX ISA, "Tensors" and "tensormap.replace").

Addresses = npt.NDArray[np.int64]
Fail = Callable[[str], Exception]

# Codes of tensormap.replace (PTX ISA, table of .elemtype and of .swizzle_mode).
ELEMENT_BYTES = {1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 10: 2}
SWIZZLE_LINES = {0: 0, 1: 32, 2: 64, 3: 128}
SCALARS = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "fill_mode")
BY_DIMENSION = ("box_dim", "global_dim", "global_stride", "element_stride")


@dataclass
class TensorMap:
    """The fields of a map: scalars under their name, others under (name, dimension)."""

    fields: dict[str | tuple[str, int], int] = field(default_factory=dict)
    ready: bool = False  # Whether a fence made it usable for copies.

    def get(self, name: str, dimension: int | None, fail: Fail) -> int:
        """Return a field; one that was never written cannot be used."""
        key = name if dimension is None else (name, dimension)
        if key not in self.fields:
            raise fail(f"a tensor map without {name}")
        return self.fields[key]

    def box(
        self, at: list[int], shared: int, fail: Fail
    ) -> tuple[Addresses, Addresses, npt.NDArray[np.bool_], int]:
        """Return the elements of the box at these coordinates, as flat arrays.

        Returns:
            Addresses in global memory, addresses in shared memory, which elements are inside the tensor, and
            the bytes of an element.
        """
        rank = self.get("rank", None, fail) + 1
        size = ELEMENT_BYTES.get(self.get("elemtype", None, fail), 0)
        line = SWIZZLE_LINES.get(self.get("swizzle_mode", None, fail))
        if rank != len(at) or not size or line is None:
            raise fail(f"a tensor map of rank {rank}, element type or swizzle that is not known")
        strides = [1 if d == 0 else self.get("global_stride", d - 1, fail) for d in range(rank)]
        boxes = [self.get("box_dim", d, fail) for d in range(rank)]
        odd = [self.get("element_stride", d, fail) != 1 for d in range(rank)]
        odd += [self.get(name, None, fail) != 0 for name in ("interleave_layout", "fill_mode")]
        odd += [each % 16 != 0 for each in strides[1:]]
        if any(odd) or (line and (boxes[0] * size > line or shared % (8 * line))) or shared % 128:
            raise fail(
                "a tensor map with strides of elements, interleaving, or addresses not aligned"
            )
        address = np.full([1] * rank, self.get("global_address", None, fail), np.int64)
        dense, inside = np.zeros([1] * rank, np.int64), np.ones([1] * rank, bool)
        pitch = size
        for dimension in range(rank):
            shape = [1] * rank
            shape[rank - 1 - dimension] = boxes[dimension]
            step = np.arange(boxes[dimension]).reshape(shape)
            index = at[dimension] + step
            address = address + index * (size if dimension == 0 else strides[dimension])
            inside = inside & (index >= 0) & (index < self.get("global_dim", dimension, fail))
            dense = dense + step * pitch
            pitch *= boxes[dimension]
        placed = shared + dense
        return (
            address.reshape(-1),
            (swizzled(placed, line) if line else placed).reshape(-1),
            inside.reshape(-1),
            size,
        )


@dataclass
class TensorArgument:
    """A tensor descriptor that the host passes: an argument of a kernel, in place of a Buffer.

    Args:
        buffer: the tensor's memory.
        shape: sizes, the outermost dimension first.
        strides: in elements; the last is 1.
        metadata: what the compiler chose, one entry of Triton's `metadata.tensordesc_meta`: "swizzle",
            "elem_type" and "block_size".
        padding: what elements outside the tensor are: "zero"; anything else is refused when it is used.

    The kernel has parameters for the map, then for each size, then for each stride: see `arguments`.
    """

    buffer: Buffer
    shape: Sequence[int]
    strides: Sequence[int]
    metadata: Mapping[str, Any]
    padding: str = "zero"

    def arguments(self) -> list[TensorArgument | int]:
        """Return what stands in the list of arguments for this descriptor."""
        return [self, *self.shape, *self.strides]

    def tensor_map(self) -> TensorMap:
        """Return the map, when the buffer has its address."""
        rank, size = len(self.shape), self.buffer.data.dtype.itemsize
        made = TensorMap(ready=True)
        made.fields = {
            "global_address": self.buffer.base,
            "rank": rank - 1,
            "elemtype": int(self.metadata["elem_type"]),
            "interleave_layout": 0,
            "swizzle_mode": int(self.metadata["swizzle"]),
            "fill_mode": int(self.padding != "zero"),
        }
        for d in range(rank):
            outer = rank - 1 - d
            made.fields["box_dim", d] = int(self.metadata["block_size"][outer])
            made.fields["global_dim", d] = int(self.shape[outer])
            made.fields["element_stride", d] = 1
            if d:
                made.fields["global_stride", d - 1] = int(self.strides[outer]) * size
        return made


COPY, STORE = "bulk copy", "bulk store"
LOAD_FORM = ("shared::cta", "global", "mbarrier::complete_tx::bytes")
STORE_FORM = ("global", "shared::cta", "bulk_group")


def maps(machine: State) -> dict[tuple[str, int], TensorMap]:
    """Return the tensor maps of the CTA, by space and address."""
    found: dict[tuple[str, int], TensorMap] = machine.state.setdefault("tensor maps", {})
    return found


def order_of(machine: State) -> Asynchronous:
    """Return the open work of the CTA."""
    assert machine.asynchronous is not None
    return machine.asynchronous


@decoder("tensormap.replace.tile")
def replace(instruction: Instruction) -> Step:
    """Write one field of a tensor map in shared memory."""
    parts, operands = instruction.parts, instruction.operands
    name, by_dimension = parts[3], parts[3] in BY_DIMENSION
    width = {"b32": 32, "b64": 64}.get(parts[-1], 0)
    if parts[4:-1] != ("shared::cta", "b1024") or not width or len(operands) != 2 + by_dimension:
        raise unknown(instruction)
    if name not in (*SCALARS, *BY_DIMENSION) or (
        by_dimension and not isinstance(operands[1], Immediate)
    ):
        raise unknown(instruction, "field of")

    def step(machine: State, mask: Array | None) -> None:
        thread = issuing_thread(machine, mask)
        if thread is None:
            return
        where = ("shared", int(machine.address(operands[0])[thread]))
        made = maps(machine).setdefault(where, TensorMap())
        key = (
            (name, operands[1].value)
            if isinstance(operands[1], Immediate) and by_dimension
            else name
        )
        made.fields[key] = value_at(machine, operands[-1], width, thread)

    return step


@decoder("tensormap.cp_fenceproxy", "fence.proxy.tensormap::generic")
def publish(instruction: Instruction) -> Step:
    """Copy a map from shared to global memory, and make a map in global memory usable for copies."""
    copies = instruction.parts[0] == "tensormap"
    form = ("global", "shared::cta", "tensormap::generic", "release", "gpu", "sync", "aligned")
    expected = form if copies else ("acquire", "gpu")
    size = instruction.operands[-1] if instruction.operands else None
    if instruction.parts[2 if copies else 3 :] != expected or size != Immediate(128, "int"):
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        threads = np.ones(machine.threads, bool) if mask is None else mask
        if not threads.any():
            return
        thread = int(np.flatnonzero(threads)[0])
        where = ("global", int(machine.address(instruction.operands[0])[thread]))
        if copies:
            source = ("shared", int(machine.address(instruction.operands[1])[thread]))
            if source not in maps(machine):
                raise no_map(machine, source[1])
            maps(machine)[where] = TensorMap(dict(maps(machine)[source].fields))
        elif where in maps(machine):
            maps(machine)[where].ready = True
        else:
            raise no_map(machine, where[1])

    return step


@decoder("cp.async.bulk.tensor")
def copy(instruction: Instruction) -> Step:
    """Copy a box between a tensor and shared memory."""
    parts, operands = instruction.parts, instruction.operands
    loads = parts[5:] == LOAD_FORM
    if not (loads or parts[5:] == STORE_FORM) or len(operands) != (3 if loads else 2):
        raise unknown(instruction)
    place, shared = (operands[1], operands[0]) if loads else (operands[0], operands[1])
    rank = int(parts[4][0]) if parts[4][1:] == "d" else 0
    found = place.items if isinstance(place, Vector) else ()
    if len(found) != 2 or not isinstance(found[1], Vector) or len(found[1].items) != rank:
        raise unknown(instruction, "operands of")
    tensor, coordinates = found[0], found[1].items
    if not isinstance(shared, Address) or not isinstance(tensor, Register):
        raise unknown(instruction, "operands of")

    def step(machine: State, mask: Array | None) -> None:
        threads = np.arange(machine.threads) if mask is None else np.flatnonzero(mask)
        for thread in threads.tolist():
            into = int(machine.address(shared)[thread])
            outer, inner, inside, size = box_of(machine, tensor, coordinates, into, thread)
            if loads:
                barrier = int(machine.address(operands[2])[thread])
                load(machine, outer, inner, inside, size, thread, barrier)
            else:
                store(machine, outer, inner, inside, size, thread)

    return step


def box_of(
    machine: State, tensor: Register, coordinates: tuple[Operand, ...], shared: int, thread: int
) -> tuple[Array, Array, Array, int]:
    """Return the elements of the box that a thread asks for."""
    where = ("global", value_at(machine, tensor, 64, thread))
    if where not in maps(machine):
        raise no_map(machine, where[1])
    if not maps(machine)[where].ready:
        raise refuse(
            RaceError,
            machine.current,
            expected="fence.proxy.tensormap between writing a tensor map and using it",
            received=f"a map at {where[1]:#x} without it",
            remedy="put the fence back",
        )

    def fail(received: str) -> Exception:
        return refuse(
            OpcodeError,
            machine.current,
            expected="a tensor map as Triton makes it",
            received=received,
            remedy="use tl.make_tensor_descriptor, or load through pointers",
        )

    at = [value_at(machine, each, 32, thread) for each in coordinates]
    signed = [each - (1 << 32) if each >> 31 else each for each in at]
    return maps(machine)[where].box(signed, shared, fail)


def load(
    machine: State, outer: Array, inner: Array, inside: Array, size: int, thread: int, barrier: int
) -> None:
    """Copy from the tensor to shared memory; what is outside the tensor becomes zero."""
    order, one = order_of(machine), np.arange(machine.threads) == thread
    pieces = np.unique(inner // PIECE)
    order.touch(machine.current, pieces, one, write=True)
    order.check_visible(machine.current, pieces, one)
    index = halves_of(machine, inner, size)
    machine.shared.halves[index] = 0
    if machine.shared.names is not None:
        machine.shared.names[index] = nm.FIXED
    if inside.any():
        buffer = machine.buffer_at("global", outer[inside], size)
        source = (outer[inside] - buffer.base)[:, None] // 2 + np.arange(size // 2)
        machine.shared.halves[index[inside]] = buffer.halves[source]
        if buffer.integers is not None and machine.integer_bits is not None:
            machine.integer_bits.touched |= bool(buffer.integers[source].any())
            machine.mark(machine.shared, index[inside])
        if machine.shared.names is not None:
            machine.shared.names[index[inside]] = buffer.named()[source]
        if machine.races is not None:
            at, threads = outer[inside] - buffer.base, np.full(int(inside.sum()), thread)
            machine.races.read(Access(machine.current, buffer, at, size, threads))
    if machine.races is not None:
        threads = np.full(len(inner), thread)
        machine.races.write(Access(machine.current, machine.shared, inner, size, threads))
    work = order.start(machine.current, COPY, box=(inner, size))
    order.writer[pieces] = work.number + 1
    arrival = Arrival(0, len(inner) * size, work.number, COPY)
    barriers(machine).get(barrier, thread).coming.append(arrival)


def store(
    machine: State, outer: Array, inner: Array, inside: Array, size: int, thread: int
) -> None:
    """Copy from shared memory to the tensor; what is outside the tensor is left out."""
    order, one = order_of(machine), np.arange(machine.threads) == thread
    pieces = np.unique(inner // PIECE)
    order.check_visible(machine.current, pieces, one)
    index = halves_of(machine, inner, size)[inside]
    if inside.any():
        buffer = machine.buffer_at("global", outer[inside], size)
        target = (outer[inside] - buffer.base)[:, None] // 2 + np.arange(size // 2)
        if machine.integer_bits is not None and machine.shared.integers is not None:
            machine.integer_bits.touched |= bool(machine.shared.integers[index].any())
        machine.mark(buffer, target)
        buffer.halves[target] = machine.shared.halves[index]
        if machine.shared.names is not None:
            buffer.named()[target] = known(machine.shared.names[index])[0]
        if machine.races is not None:
            at, threads = outer[inside] - buffer.base, np.full(int(inside.sum()), thread)
            machine.races.write(Access(machine.current, buffer, at, size, threads))
    work = order.start(machine.current, STORE, pieces)
    groups: dict[int, list[list[Work]]] = machine.state.setdefault("bulk groups", {})
    groups.setdefault(thread, [[]])[-1].append(work)


def halves_of(machine: State, inner: Array, size: int) -> Array:
    """Return the halves of elements in shared memory; refuse addresses outside."""
    if int(inner.max()) + size > machine.shared.size:
        raise refuse(
            AddressError,
            machine.current,
            expected=f"a box inside shared memory ({machine.shared.size} bytes)",
            received=f"byte {int(inner.max())}",
            remedy="give the launch the kernel's shared memory",
        )
    index: Array = inner[:, None] // 2 + np.arange(size // 2)
    return index


@decoder("cp.async.bulk.commit_group", "cp.async.bulk.wait_group")
def groups(instruction: Instruction) -> Step:
    """Close a group of bulk stores of each thread, or wait until all but the newest groups have read."""
    waits = instruction.parts[3] == "wait_group"
    if instruction.parts[4:] not in (((), ("read",)) if waits else ((),)):
        raise unknown(instruction)
    newest = instruction.operands[0] if waits else None
    if waits and not isinstance(newest, Immediate):
        raise unknown(instruction, "operand of")

    def step(machine: State, mask: Array | None) -> None:
        for thread, groups in machine.state.setdefault("bulk groups", {}).items():
            if mask is not None and not mask[thread]:
                continue
            if not isinstance(newest, Immediate):
                groups.append([])
                continue
            ended = max(len(groups) - 1 - newest.value, 0)
            for group in groups[:ended]:
                order_of(machine).end(group, None)
            del groups[:ended]

    return step


def no_map(machine: State, address: int) -> Exception:
    """Return the error for a tensor map that the kernel did not make."""
    return refuse(
        OpcodeError,
        machine.current,
        expected="a tensor map that the kernel makes itself (tl.make_tensor_descriptor)",
        received=f"no map at {address:#x}",
        remedy="make the descriptor in the kernel, or load through pointers",
    )
