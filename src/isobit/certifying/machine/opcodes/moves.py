"""Moves: whole registers, packing and unpacking of parts, addresses, constants."""

from __future__ import annotations

import numpy as np

from isobit.certifying.machine.opcodes.bitwise import from_halves, half_list
from isobit.certifying.machine.opcodes.table import Step, decoder, opcode
from isobit.certifying.machine.registers import UNSIGNED
from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import WIDTHS, Instruction, Operand, Register, Vector
from isobit.certifying.running.refusals import unknown


@decoder("mov", register_only=True)
def move(instruction: Instruction) -> Step:
    """Decode a move, a packing {a, b} -> c, or an unpacking c -> {a, b}."""
    kind = instruction.parts[-1]
    if len(instruction.parts) != 2 or kind not in WIDTHS:
        raise unknown(instruction, "type of")
    width = WIDTHS[kind]
    target, source = instruction.operands
    if isinstance(target, Vector):
        return lambda machine, mask: unpack(machine, mask, target, source, width)
    if isinstance(source, Vector):
        return lambda machine, mask: pack(machine, mask, target, source, width)

    def step(machine: State, mask: Array | None) -> None:
        bits = machine.bits(source, width)
        made = None
        if isinstance(source, Register) and machine.names:
            made = machine.named[source.index]
        machine.write(target, bits, mask, made)

    return step


def unpack(machine: State, mask: Array | None, target: Vector, source: Operand, width: int) -> None:
    """Write the parts of one register to several."""
    part = width // len(target.items)
    values = np.ascontiguousarray(machine.bits(source, width)).view(UNSIGNED[part])
    values = values.reshape(machine.threads, len(target.items))
    halves = None
    if machine.names and machine.tainted(source):
        halves = half_list(machine, source, width)
    each = part // 16
    for i, register in enumerate(target.items):
        made = from_halves(halves[i * each : (i + 1) * each]) if halves else None
        machine.write(register, values[:, i].copy(), mask, made)


def pack(machine: State, mask: Array | None, target: Operand, source: Vector, width: int) -> None:
    """Write several registers to the parts of one."""
    part = width // len(source.items)
    values = np.stack([machine.bits(each, part) for each in source.items], -1)
    made = None
    if machine.names and any(map(machine.tainted, source.items)):
        made = from_halves([h for each in source.items for h in half_list(machine, each, part)])
    machine.write(target, values.reshape(-1).view(UNSIGNED[width]), mask, made)


@opcode("cvta")
def convert_address(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Copy an address: the machine's spaces have addresses of their own."""
    if "shared" in instruction.opcode and "to" not in instruction.parts:
        raise unknown(instruction, "generic address of shared memory by")
    target, source = instruction.operands
    machine.write(target, machine.bits(source, 64), mask, machine.named[source.index])  # type: ignore[union-attr]
