"""tcgen05 of sm_100: one thread starts the tensor core; accumulators are in tensor memory.

The instruction descriptor of tcgen05.mma (PTX ISA, "Instruction descriptor", for .kind::f16 and .kind::tf32):
bits 4-5 type of D, 7-9 type of A, 10-12 type of B, 13-14 negation, 15-16 transposes (1: MN-major), 17-22 N / 8,
24-28 M / 16. All other bits are refused.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from isobit.certifying.machine.asynchronous import Asynchronous
from isobit.certifying.machine.barrier_objects import barriers, issuing_thread, value_at
from isobit.certifying.machine.mbarriers import Arrival
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.machine.tensor_core import (
    Tile,
    joined,
    multiply,
    named,
    shared_tile,
    tcgen05_descriptor,
    zeros,
)
from isobit.certifying.machine.tensor_memory import (
    LANES,
    Cells,
    TensorMemory,
    matrix_cells,
    message_cells,
)
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx import Address, Immediate, Instruction, Operand, Register, Vector
from isobit.certifying.running.refusals import DivergentBranchError, RaceError, refuse, unknown

MMA = "tcgen05.mma"
# Kind -> code of the operand type -> its name.
TYPES = {"kind::f16": {0: "f16", 1: "bf16"}, "kind::tf32": {2: "tf32"}}
KNOWN_BITS = 0b11 << 4 | 0b111 << 7 | 0b111 << 10 | 0b11 << 15 | 0x3F << 17 | 0x1F << 24


def tensor_memory(machine: State) -> TensorMemory:
    """Return the tensor memory of the CTA."""
    found: TensorMemory = machine.state.setdefault("tensor memory", TensorMemory(machine.names))
    return found


def order_of(machine: State) -> Asynchronous:
    """Return the open work of the CTA."""
    assert machine.asynchronous is not None
    return machine.asynchronous


@decoder("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def allocation(instruction: Instruction) -> Step:
    """Reserve and return columns of tensor memory; one warp does it."""
    known = {
        "alloc": ("cta_group::1", "sync", "aligned", "shared::cta", "b32"),
        "dealloc": ("cta_group::1", "sync", "aligned", "b32"),
        "relinquish_alloc_permit": ("cta_group::1", "sync", "aligned"),
    }
    kind, operands = instruction.parts[1], instruction.operands
    if instruction.parts[2:] != known[kind] or len(operands) != (
        0 if kind.startswith("rel") else 2
    ):
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        warp = whole_warps(machine, mask)
        if not warp.any():
            return
        if warp.sum() != 32:
            raise unknown(instruction, "several warps that execute")
        memory, first = tensor_memory(machine), int(np.flatnonzero(warp)[0])
        if kind == "relinquish_alloc_permit":
            machine.state["no more columns"] = True
            return
        columns = operands[1].value if isinstance(operands[1], Immediate) else 0
        if kind == "dealloc":
            if machine.asynchronous is not None:
                everything = [Cells(0xFF, 0, 512)]
                order_of(machine).touch_cells(instruction, everything, warp, write=True, own=False)
            memory.free(value_at(machine, operands[0], 32, first), columns)
            return
        if machine.state.get("no more columns"):
            raise unknown(instruction, "tcgen05.relinquish_alloc_permit before")
        address = memory.allocate(columns)
        halves = np.array([address & 0xFFFF, address >> 16], np.uint16)
        one = np.arange(machine.threads) == first
        data = np.broadcast_to(halves, (machine.threads, 2))
        machine.store("shared", machine.address(operands[0]), data, None, one)

    return step


@decoder("tcgen05.ld", "tcgen05.st")
def message(instruction: Instruction) -> Step:
    """Move registers to or from the lanes of tensor memory that a warp owns."""
    parts, operands = instruction.parts, instruction.operands
    loads = parts[1] == "ld"
    shape = re.fullmatch(r"(32x32b|16x32bx2)\.x(\d+)", ".".join(parts[4:6]))
    if shape is None or parts[2:4] != ("sync", "aligned") or parts[6:] != ("b32",):
        raise unknown(instruction)
    where = operands[1 if loads else 0]
    values = operands[0] if loads else operands[-1]
    splits = shape[1] == "16x32bx2"
    if len(operands) != 2 + splits or not isinstance(where, Address):
        raise unknown(instruction, "operands of")
    middle = operands[2 if loads else 1] if splits else None
    split = middle.value if isinstance(middle, Immediate) else None
    found = values.items if isinstance(values, Vector) else ()
    registers = [each for each in found if isinstance(each, Register) and each.width == 32]
    if (
        len(registers) != int(shape[2])
        or len(found) != len(registers)
        or (splits and split is None)
    ):
        raise unknown(instruction, "number of registers of")

    def step(machine: State, mask: Array | None) -> None:
        warps = whole_warps(machine, mask)
        if not warps.any():
            return
        if not warps.all():
            raise unknown(instruction, "some warps only that execute")
        memory, order = tensor_memory(machine), order_of(machine)
        addresses = machine.address(where)
        lanes, columns, cells = message_cells(shape[1], len(registers), addresses, split)
        memory.check_allocated(columns, instruction.opcode)
        order.touch_cells(instruction, cells, warps, write=not loads, own=True)
        if loads:
            load_registers(machine, memory, registers, lanes, columns, mask)
            outputs = frozenset(each.index for each in registers)
            order.start(instruction, "tcgen05.ld", reads=cells, outputs=outputs)
        else:
            store_registers(machine, memory, registers, lanes, columns)
            inputs = frozenset(each.index for each in registers)
            order.start(instruction, "tcgen05.st", writes=cells, inputs=inputs)

    return step


def load_registers(
    machine: State,
    memory: TensorMemory,
    registers: list[Register],
    lanes: Array,
    columns: Array,
    mask: Array | None,
) -> None:
    """Write registers from cells [threads, registers]."""
    bits = memory.bits[lanes, columns]
    made = memory.names[lanes, columns] if memory.names is not None else None
    for i, register in enumerate(registers):
        word = None
        if made is not None:
            low, high = np.ascontiguousarray(made[:, i, 0]), np.ascontiguousarray(made[:, i, 1])
            word = Word(low=low, high=high)
        machine.write(register, np.ascontiguousarray(bits[:, i]), mask, word)


def store_registers(
    machine: State, memory: TensorMemory, registers: list[Register], lanes: Array, columns: Array
) -> None:
    """Write cells [threads, registers] from registers."""
    memory.bits[lanes, columns] = np.stack([machine.bits(each, 32) for each in registers], -1)
    if memory.names is not None:
        halves = {each.index: np.stack(machine.halves(each), -1) for each in registers}
        memory.names[lanes, columns] = np.stack([halves[each.index] for each in registers], 1)


@decoder("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(instruction: Instruction) -> Step:
    """Wait for the loads or stores of tensor memory that a warp has issued."""
    if instruction.parts[2:] != ("sync", "aligned") or instruction.operands:
        raise unknown(instruction)
    pipe = f"tcgen05.{instruction.parts[1][-2:]}"

    def step(machine: State, mask: Array | None) -> None:
        if not whole_warps(machine, mask).all():
            raise unknown(instruction, "some warps only that execute")
        order = order_of(machine)
        order.end([each for each in order.open.values() if each.pipe == pipe], None)

    return step


@decoder("tcgen05.mma")
def mma(instruction: Instruction) -> Step:
    """Multiply: D in tensor memory, A in tensor or shared memory, B in shared memory."""
    parts, operands = instruction.parts, instruction.operands
    if len(parts) != 4 or parts[2] != "cta_group::1" or parts[3] not in TYPES or len(operands) != 5:
        raise unknown(instruction)
    if not isinstance(operands[0], Address):
        raise unknown(instruction, "operands of")

    def step(machine: State, mask: Array | None) -> None:
        thread = mma_thread(machine, mask)
        if thread is None:
            return
        memory, order = tensor_memory(machine), order_of(machine)
        rows, columns, dtype, a_k_major, b_k_major = described(
            machine, operands[3], thread, parts[3]
        )
        d_at = int(machine.address(operands[0])[thread])
        lanes, into, cells = matrix_cells(d_at, rows, columns)
        memory.check_allocated(into, instruction.opcode)
        one = np.arange(machine.threads) == thread
        reads, pieces = [], []
        if isinstance(operands[1], Address):
            a_at = int(machine.address(operands[1])[thread])
            a, a_cells = tensor_tile(machine, memory, a_at, rows, dtype)
            reads.append(a_cells)
        else:
            bits, made, touched = shared_tile(
                machine,
                tcgen05_descriptor(value_at(machine, operands[1], 64, thread)),
                rows,
                dtype,
                a_k_major,
            )
            a = (bits, made)
            pieces.append(touched)
        descriptor = tcgen05_descriptor(value_at(machine, operands[2], 64, thread))
        bits, made, touched = shared_tile(machine, descriptor, columns, dtype, b_k_major)
        pieces.append(touched)
        everything = np.unique(np.concatenate(pieces))
        order.check_visible(instruction, everything, one)
        order.touch_cells(instruction, [*reads, cells], one, write=False, own=False)
        order.touch_cells(instruction, [cells], one, write=True, own=False)
        at: tuple[Any, ...] = np.ix_(lanes, into)
        if rows == LANES:
            at = (slice(None), slice(into[0], into[0] + columns))  # a view, not a copy
        c = zeros(machine, (rows, columns))
        if value_at(machine, operands[4], 1, thread):
            c = (
                np.ascontiguousarray(memory.bits[at]),
                None if memory.names is None else named(memory.names[at]),
            )
        total, result = multiply(machine, a, (bits, made), c, dtype)
        memory.bits[at] = total
        if memory.names is not None and result is not None:
            memory.names[at] = np.stack(nm.split(result), -1)
        order.start(instruction, MMA, everything, reads=reads, writes=[cells])

    return step


def described(
    machine: State, operand: Operand, thread: int, kind: str
) -> tuple[int, int, str, bool, bool]:
    """Return rows, columns, operand type and majors from an instruction descriptor."""
    bits = value_at(machine, operand, 32, thread)
    a, b = TYPES[kind].get(bits >> 7 & 7), TYPES[kind].get(bits >> 10 & 7)
    rows, columns = (bits >> 24 & 0x1F) * 16, (bits >> 17 & 0x3F) * 8
    wrong = bits & ~KNOWN_BITS or bits >> 4 & 3 != 1 or a is None or a != b
    if wrong or rows not in (64, 128) or not 8 <= columns <= 256 or (rows == 128 and columns % 16):
        raise unknown(machine.current, f"instruction descriptor {bits:#010x} of")
    assert a is not None
    return rows, columns, a, not bits >> 15 & 1, not bits >> 16 & 1


def tensor_tile(
    machine: State, memory: TensorMemory, address: int, rows: int, dtype: str
) -> tuple[Tile, Cells]:
    """Read A [rows, k] from tensor memory: 32 bytes of k are 8 columns."""
    lanes, columns, cells = matrix_cells(address, rows, 8)
    memory.check_allocated(columns, machine.current.opcode)
    at = np.ix_(lanes, columns)
    halves = np.ascontiguousarray(memory.bits[at]).view(np.uint16)  # [rows, 16]
    made = None if memory.names is None else memory.names[at].reshape(rows, 16)
    if dtype == "tf32":
        pairs = halves.reshape(rows, 8, 2)
        return (joined(pairs), None if made is None else named(made.reshape(rows, 8, 2))), cells
    return (halves, None if made is None else named(made[..., None])), cells


@decoder("tcgen05.commit")
def commit(instruction: Instruction) -> Step:
    """Let a barrier object receive an arrival when all mma so far have ended."""
    form = ("cta_group::1", "mbarrier::arrive::one", "shared::cluster", "b64")
    if instruction.parts[2:] != form or len(instruction.operands) != 1:
        raise unknown(instruction)

    def step(machine: State, mask: Array | None) -> None:
        thread = mma_thread(machine, mask)
        if thread is None:
            return
        address = int(machine.address(instruction.operands[0])[thread])
        last = order_of(machine).count - 1
        barriers(machine).get(address, thread).coming.append(Arrival(1, 0, last, MMA))

    return step


def whole_warps(machine: State, mask: Array | None) -> Array:
    """Return the threads that execute a .sync.aligned instruction; refuse a part of a warp."""
    threads = np.ones(machine.threads, bool) if mask is None else mask
    warps = threads.reshape(-1, 32)
    if (warps.any(1) != warps.all(1)).any():
        raise refuse(
            DivergentBranchError,
            machine.current,
            expected="all threads of a warp in an instruction that is .aligned",
            received="some of its threads",
            remedy="check the guard of the instruction",
        )
    return threads


def mma_thread(machine: State, mask: Array | None) -> int | None:
    """Return the thread that issues tensor-core work, if any; refuse a second one: nothing orders both."""
    thread = issuing_thread(machine, mask)
    if thread is not None and machine.state.setdefault("mma thread", thread) != thread:
        raise refuse(
            RaceError,
            machine.current,
            expected="one thread that issues tcgen05.mma and tcgen05.commit",
            received="a second thread",
            remedy="compile without warp specialisation",
        )
    return thread
