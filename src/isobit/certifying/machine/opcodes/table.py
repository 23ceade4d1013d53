"""The table of opcodes. Another file adds to it with `opcode` or `decoder`.

An opcode is found by its longest known prefix: "mma.sync" is found for
"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", and "mma" is not asked if "mma.sync" is known.
A function takes (machine, instruction, mask): `mask` is None if all threads execute, else one bool
per thread. It reads with machine.bits, machine.word, machine.halves, machine.half and writes with
machine.write. A decoder takes the instruction once, when the machine is made, and returns what
runs each time: it is where modifiers are checked and refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import unknown

Step = Callable[[State, "Array | None"], None]
Decoder = Callable[[Instruction], Step]
Function = Callable[[State, Instruction, "Array | None"], None]

OPCODES: dict[str, Decoder] = {}
# Opcodes that only read and write registers of one thread: a guard that depends on data makes
# their result a select. Every other opcode refuses such a guard.
REGISTER_ONLY: set[str] = set()


def decoder(*prefixes: str, register_only: bool = False) -> Callable[[Decoder], Decoder]:
    """Register a function that takes an instruction and returns what runs it."""

    def register(function: Decoder) -> Decoder:
        for prefix in prefixes:
            OPCODES[prefix] = function
            if register_only:
                REGISTER_ONLY.add(prefix)
        return function

    return register


def opcode(*prefixes: str, register_only: bool = False) -> Callable[[Function], Function]:
    """Register a function(machine, instruction, mask)."""

    def register(function: Function) -> Function:
        def decode(instruction: Instruction) -> Step:
            def step(machine: State, mask: Array | None) -> None:
                function(machine, instruction, mask)

            return step

        decoder(*prefixes, register_only=register_only)(decode)
        return function

    return register


def find(instruction: Instruction) -> tuple[Decoder, bool]:
    """Return the decoder of an instruction, and whether it only uses registers."""
    parts = list(instruction.parts)
    while parts:
        prefix = ".".join(parts)
        if prefix in OPCODES:
            return OPCODES[prefix], prefix in REGISTER_ONLY
        parts.pop()
    raise unknown(instruction)


def modifiers(instruction: Instruction, *known: str) -> set[str]:
    """Return the parts after the first; one that is not known is refused."""
    found = set(instruction.parts[1:])
    if found - set(known):
        raise unknown(instruction, f"modifier .{min(found - set(known))} of")
    return found


def operand(instruction: Instruction, index: int) -> Any:
    """Return an operand, or refuse an instruction that has too few."""
    if index >= len(instruction.operands):
        raise unknown(instruction, "number of operands of")
    return instruction.operands[index]
