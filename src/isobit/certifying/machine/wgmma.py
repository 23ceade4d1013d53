"""wgmma of sm_90: a warp group multiplies tiles of shared memory, or registers by shared memory, asynchronously.

Where a thread's registers are in the tile (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"): warp w of
the group has rows 16 w to 16 w + 15. Register i of the accumulator is row lane / 4 + 8 (i / 2 % 2), column
8 (i / 4) + 2 (lane % 4) + i % 2. Register i of A is two k from 2 (lane % 4) + 8 (i / 2), row lane / 4 + 8 (i % 2).
"""

from __future__ import annotations

import functools
import re

import numpy as np

from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.machine.tensor_core import (
    Tile,
    multiply,
    shared_tile,
    wgmma_descriptor,
    zeros,
)
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx import Immediate, Instruction, Operand, Register, Vector
from isobit.certifying.running.refusals import DivergentBranchError, refuse, unknown

DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8}
THREAD = np.arange(128)
ROW, QUAD = THREAD // 32 * 16 + THREAD % 32 // 4, THREAD % 4


@decoder("wgmma.mma_async")
def mma_async(instruction: Instruction) -> Step:
    """Check the form of a wgmma once, and return what runs it."""
    parts, operands = instruction.parts, instruction.operands
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", parts[4]) if len(parts) == 8 else None
    if (
        shape is None
        or parts[2:4] != ("sync", "aligned")
        or parts[5] != "f32"
        or parts[6] != parts[7]
    ):
        raise unknown(instruction)
    columns, depth, dtype = int(shape[1]), int(shape[2]), parts[6]
    if DEPTHS.get(dtype) != depth:
        raise unknown(instruction, "operand type")
    from_registers = len(operands) > 1 and isinstance(operands[1], Vector)
    transposes = 0 if dtype == "tf32" else 1 if from_registers else 2
    if len(operands) != 6 + transposes:
        raise unknown(instruction, "number of operands of")
    numbers = [each.value if isinstance(each, Immediate) else -1 for each in operands[4:]]
    if numbers[:2] != [1, 1] or any(each not in (0, 1) for each in numbers[2:]):
        raise unknown(instruction, "a negated operand, or a transpose that is not 0 or 1, of")
    a_k_major = not (transposes == 2 and numbers[2])
    b_k_major = not (transposes and numbers[-1])
    accumulator = items(instruction, operands[0], columns // 2)

    def step(machine: State, mask: Array | None) -> None:
        everyone(machine, mask)
        groups = machine.threads // 128
        order = machine.asynchronous
        assert order is not None
        inputs: frozenset[int] = frozenset()
        pieces: list[Array] = []
        if from_registers:
            registers = items(instruction, operands[1], 4)
            inputs = frozenset(each.index for each in registers)
            a = a_fragments(machine, registers, dtype)
        else:
            a = tiles(machine, operands[1], 64, dtype, a_k_major, pieces)
        b = tiles(machine, operands[2], columns, dtype, b_k_major, pieces)
        outputs = frozenset(each.index for each in accumulator)
        order.check_fenced(instruction, outputs)
        touched = np.unique(np.concatenate(pieces))
        order.check_visible(instruction, touched, order.everyone)
        c = zeros(machine, (groups, 64, columns))
        if accumulates(machine, operands[3]):
            c = gather(machine, accumulator, c)
        bits, made = multiply(machine, a, b, c, dtype)
        scatter(machine, accumulator, bits, made)
        work = order.start(instruction, "wgmma", touched, outputs=outputs, inputs=inputs)
        machine.state.setdefault("wgmma", [[]])[-1].append(work)

    return step


@decoder("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group")
def ordering(instruction: Instruction) -> Step:
    """Order wgmma: registers written before the fence are ready; groups end when they are waited for."""
    if instruction.parts[2:] != ("sync", "aligned"):
        raise unknown(instruction)
    kind = instruction.parts[1]
    if len(instruction.operands) != (kind == "wait_group"):
        raise unknown(instruction, "number of operands of")

    def step(machine: State, mask: Array | None) -> None:
        everyone(machine, mask)
        order, groups = machine.asynchronous, machine.state.setdefault("wgmma", [[]])
        assert order is not None
        if kind == "fence":
            order.fenced = True
            order.touched.clear()
        elif kind == "commit_group":
            groups.append([])
        else:
            newest = instruction.operands[0]
            if not isinstance(newest, Immediate):
                raise unknown(instruction, "operand of")
            # The last list has what is not committed: it is never waited for.
            ended = len(groups) - 1 - newest.value
            for group in groups[: max(ended, 0)]:
                order.end(group, None)
            del groups[: max(ended, 0)]

    return step


def everyone(machine: State, mask: Array | None) -> None:
    """Refuse wgmma that only some warps execute, and CTAs without whole warp groups."""
    if (mask is not None and not mask.all()) or machine.threads % 128:
        raise refuse(
            DivergentBranchError,
            machine.current,
            expected="wgmma executed by all warp groups of the CTA",
            received="some warps only",
            remedy="compile without warp specialisation",
        )


def items(instruction: Instruction, operand: Operand, count: int) -> list[Register]:
    """Return the registers of a vector operand."""
    found = operand.items if isinstance(operand, Vector) else ()
    registers = [each for each in found if isinstance(each, Register) and each.width == 32]
    if len(registers) != count or len(found) != count:
        raise unknown(instruction, "number of registers of")
    return registers


def accumulates(machine: State, operand: Operand) -> bool:
    """Return the operand scale-d; all threads must agree."""
    values = machine.bits(operand, 1)
    if machine.tainted(operand) or (values != values[0]).any():
        raise unknown(machine.current, "scale-d that depends on data or on the thread in")
    return bool(values[0])


def tiles(
    machine: State, operand: Operand, rows: int, dtype: str, k_major: bool, pieces: list[Array]
) -> Tile:
    """Read the tile of each warp group: [groups, rows, k]; adds the pieces of memory that were read."""
    descriptors = machine.bits(operand, 64).reshape(-1, 128)
    if machine.tainted(operand) or (descriptors != descriptors[:, :1]).any():
        raise unknown(machine.current, "a matrix descriptor that differs in a warp group, in")
    found = {}
    for each in set(descriptors[:, 0].tolist()):
        bits, made, read = shared_tile(machine, wgmma_descriptor(each), rows, dtype, k_major)
        found[each] = (bits, made)
        pieces.append(read)
    chosen = [found[each] for each in descriptors[:, 0].tolist()]
    named = [each[1] for each in chosen if each[1] is not None]
    return np.stack([each[0] for each in chosen]), (np.stack(named) if named else None)


def a_fragments(machine: State, registers: list[Register], dtype: str) -> Tile:
    """Read A from registers: [groups, 64, k]."""
    groups, depth = machine.threads // 128, DEPTHS[dtype]
    wide = dtype == "tf32"
    bits = np.zeros((groups, 64, depth), np.uint32 if wide else np.uint16)
    made = np.zeros((groups, 64, depth), np.uint64) if machine.names else None
    for i, register in enumerate(registers):
        row = ROW + 8 * (i % 2)
        values = machine.bits(register, 32).reshape(groups, 128)
        if wide:
            k = QUAD + 4 * (i // 2)
            bits[:, row, k] = values
            if made is not None:
                made[:, row, k] = machine.word(register).reshape(groups, 128)
            continue
        for half in (0, 1):
            k = 8 * (i // 2) + 2 * QUAD + half
            bits[:, row, k] = values >> np.uint32(16 * half) & np.uint32(0xFFFF)
            if made is not None:
                made[:, row, k] = nm.value16(machine.halves(register)[half]).reshape(groups, 128)
    return bits, made


@functools.cache
def places(count: int) -> tuple[Array, Array]:
    """Return the row and the column of each accumulator register: [registers, 128]."""
    i = np.arange(count)[:, None]
    return ROW + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * QUAD + i % 2


def gather(machine: State, registers: list[Register], tile: Tile) -> Tile:
    """Read an accumulator into a tile [groups, 64, n]."""
    bits, made = tile
    row, column = places(len(registers))
    groups = len(bits)
    values = np.stack([machine.bits(each, 32).reshape(groups, 128) for each in registers], 1)
    bits[:, row, column] = values
    if made is not None:
        found = [machine.word(each).reshape(groups, 128) for each in registers]
        made[:, row, column] = np.stack(found, 1)
    return bits, made


def scatter(machine: State, registers: list[Register], bits: Array, made: Array | None) -> None:
    """Write a tile [groups, 64, n] into the accumulator."""
    row, column = places(len(registers))
    values = by_register(bits, row, column)
    named = None if made is None else by_register(made, row, column)
    for i, register in enumerate(registers):
        machine.write(register, values[i], None, None if named is None else Word(named[i]))


def by_register(tile: Array, row: Array, column: Array) -> Array:
    """Return the elements of a tile [groups, 64, n] by register and thread."""
    found = tile[:, row, column].transpose(1, 0, 2)
    return np.ascontiguousarray(found).reshape(len(row), -1)
