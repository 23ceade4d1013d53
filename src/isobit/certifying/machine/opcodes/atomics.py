"""Atomic operations: of floats their order is not defined, so they are refused by name."""

from __future__ import annotations

from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import FloatAtomicError, OpcodeError, refuse

FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"}


@decoder("atom", "red", "cp.reduce")
def atomic(instruction: Instruction) -> Step:
    """Refuse an atomic operation."""
    if FLOATS & set(instruction.parts):
        raise refuse(
            FloatAtomicError,
            instruction,
            expected="float additions in an order that the code defines",
            received=f"a float atomic, {instruction.opcode}, whose order differs between runs",
            remedy="store the partial results and add them in a second kernel, or give each output "
            "to one program (no split along the summed axis)",
        )
    raise refuse(
        OpcodeError,
        instruction,
        expected="a kernel whose programs do not depend on each other",
        received=f"an atomic on integers, {instruction.opcode}: its result depends on which "
        "program comes first",
        remedy="use two launches instead of a counter or a lock between programs",
    )
