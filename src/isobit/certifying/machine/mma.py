"""mma.sync: matrix products of a warp, from the fragments that its threads hold.

The layouts are those of the PTX ISA, "Matrix Fragments for mma.m16n8k8, k16 and k32": thread
4 * g + q of a warp holds rows g and g + 8 of A and C, column g of B, and consecutive elements of k
from q on.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.opcodes.transfers import items_of
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.leaf import multiply_accumulate, rule_of
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import Instruction, Operand
from isobit.certifying.running.refusals import unknown

# bits of an element of A and B by the type in the opcode
ELEMENT_BITS = {"bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}
OPCODE = re.compile(
    r"^mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::f8f6f4)?\.f32\.(\w+)\.(\w+)\.f32$"
)


@cache
def fragment(rows: int, depth: int, bits: int) -> Array:
    """Return where element [row, k] of A (16 rows) or B (8 rows) is among [lane, register, part]."""
    parts, both = 32 // bits, rows == 16
    registers = rows * depth * bits // 1024
    place = np.empty((rows, depth), np.int64)
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for i in range(registers):
            row = g + (8 * (i % 2) if both else 0)
            start = (i // 2 if both else i) * 4 * parts + q * parts
            for part in range(parts):
                place[row, start + part] = (lane * registers + i) * parts + part
    return place


@cache
def accumulator() -> Array:
    """Return where element [row, column] of C is among [lane, register]."""
    place = np.empty((16, 8), np.int64)
    for lane in range(32):
        for i in range(4):
            place[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = 4 * lane + i
    return place


def gather(machine: State, registers: tuple[Operand, ...], bits: int) -> Array:
    """Return the elements of registers [warp, lane * register * part]."""
    values = np.stack([machine.bits(each, 32) for each in registers], -1)
    kind = {8: np.uint8, 16: np.uint16, 32: np.uint32}[bits]
    return np.ascontiguousarray(values).view(kind).reshape(machine.threads // 32, -1)


def gather_names(machine: State, registers: tuple[Operand, ...], bits: int) -> Names:
    """Return the names of elements of registers [warp, lane * register * part]."""
    columns = [machine.names_of(each, 32).elements(bits) for each in registers]
    return np.concatenate(columns, -1).reshape(machine.threads // 32, -1)


def gather_powers(
    machine: State, registers: tuple[Operand, ...], bits: int, place: Array
) -> tuple[Names, Names]:
    """Return `names.powers` of the elements of a fragment [warp, row, k]."""
    both = [machine.names_of(each, 32).powers(bits) for each in registers]
    first, second = (
        np.concatenate([each[i] for each in both], -1).reshape(machine.threads // 32, -1)[:, place]
        for i in (0, 1)
    )
    return first, second


def matrix_product(
    machine: State,
    operands: tuple[Array, Array, Array],
    named: tuple[Names, Names, Names] | None,
    types: tuple[str, str],
) -> tuple[Array, Names | None]:
    """Return a @ b.T + c by the machine's engine: bits [..., m, n] as float32, and names.

    Args:
        machine: has the engine, and records the products.
        operands: raw a [..., m, k], b [..., n, k], and c [..., m, n] as float32.
        named: their names.
        types: of a and b, such as ("bf16", "bf16").
    """
    a, b, c = operands
    out = multiply_accumulate(a, b, c, machine.engine, types[0], types[1])
    if named is None:
        return out, None
    operation, products = operation_of(machine.engine, types)
    made = nm.dot_chain(nm.powers(named[0]), nm.powers(named[1]), named[2], operation, products)
    if machine.recorded is not None:
        machine.recorded.add_tile(named, made, operation, products, machine.current)
    return out, made


def name_products(
    machine: State,
    registers: tuple[tuple[Operand, ...], ...],
    places: tuple[Array, Array, Array],
    bits: int,
    types: tuple[str, str],
) -> Names:
    """Return the names of the products of fragments [warp, row, column]."""
    operation, products = operation_of(machine.engine, types)
    c = gather_names(machine, registers[2], 32)[:, places[2]]
    a, b = (gather_powers(machine, registers[i], bits, places[i]) for i in (0, 1))
    made = nm.dot_chain(a, b, c, operation, products)
    if machine.recorded is not None:
        x, y = (gather_names(machine, registers[i], bits)[:, places[i]] for i in (0, 1))
        machine.recorded.add_tile((x, y, c), made, operation, products, machine.current)
    return made


def operation_of(engine: str, types: tuple[str, str]) -> tuple[str, int]:
    """Return the name of the fused step of an engine, and its products."""
    dtype = types[0] if types[0] == types[1] else f"{types[0]} {types[1]}"
    return f"dot {engine} {dtype}", rule_of(engine, types[0]).products


@decoder("mma.sync")
def multiply(instruction: Instruction) -> Step:
    """Decode mma.sync of floats with an fp32 accumulator."""
    found = OPCODE.match(instruction.opcode)
    if not found or found[2] not in ELEMENT_BITS or found[3] not in ELEMENT_BITS:
        raise unknown(instruction)
    depth, types = int(found[1]), (found[2], found[3])
    bits = ELEMENT_BITS[types[0]]
    target, first, second, third = (items_of(each) for each in instruction.operands)
    sizes = (16 * depth * bits // 1024, 8 * depth * bits // 1024)
    if (len(first), len(second)) != sizes or len(target) != 4 or len(third) != 4:
        raise unknown(instruction, "number of registers of")
    if types[0] != types[1] and bits != 8:
        raise unknown(instruction, "types of")
    places = fragment(16, depth, bits), fragment(8, depth, bits), accumulator()
    back = np.argsort(accumulator().reshape(-1))

    def step(machine: State, mask: Array | None) -> None:
        machine.whole_warps(mask)
        a, b = (
            gather(machine, first, bits)[:, places[0]],
            gather(machine, second, bits)[:, places[1]],
        )
        c = gather(machine, third, 32).view(np.float32)[:, places[2]]
        out = multiply_accumulate(a, b, c, machine.engine, types[0], types[1])
        made = None
        if machine.names:
            made = name_products(machine, (first, second, third), places, bits, types)
        result = np.ascontiguousarray(out.reshape(-1, 128)[:, back]).view(np.uint32).reshape(-1, 4)
        columns = None if made is None else made.reshape(-1, 128)[:, back].reshape(-1, 4)
        for i, register in enumerate(target):
            word = None if columns is None else Word(np.ascontiguousarray(columns[:, i]))
            machine.write(register, np.ascontiguousarray(result[:, i]), mask, word)

    return step
