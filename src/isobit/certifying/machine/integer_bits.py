"""Integers whose bits are used as floats: packed weights, bf16 that arrives as int16.

[Note: integer bits]
Integers of memory are values: a kernel may index and branch by them, so they carry no name, and what is computed from
them is folded. Bits of a float that arrive as an integer would be folded, too, and two orders of addition that round
alike on these values would be one expression. So the machine follows which registers hold bits of an integer tensor,
through moves, shuffles, bit operations and memory; where a float instruction takes such a register, its bits become
symbols, one for each value, and nothing of them is folded. A conversion (cvt.rn.f32.s32) makes an ordinary number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from isobit.certifying.machine.asynchronous import RegisterUse
from isobit.certifying.machine.registers import Word
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import Instruction, Program

FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"}
CARRIED = {"mov", "selp", "shfl", "prmt", "ld", "st", "ldmatrix", "stmatrix"}


def takes_floats(instruction: Instruction) -> bool:
    """Tell whether an instruction takes its operands as floats."""
    parts = instruction.parts
    return parts[0] not in CARRIED and parts[-1] in FLOATS


def makes_number(instruction: Instruction) -> bool:
    """Tell whether an instruction converts an integer to a float."""
    parts = instruction.parts
    return parts[0] == "cvt" and parts[-1] not in FLOATS and parts[-2] in FLOATS


class IntegerBits:
    """The registers that hold bits of integer tensors."""

    def __init__(self, program: Program) -> None:
        use = RegisterUse(program)
        self.read, self.written = use.read, use.written
        self.sources = [
            use.all[at] if each.parts[0] in ("st", "stmatrix") else use.read[at]
            for at, each in enumerate(program.instructions)
        ]
        self.floats = [takes_floats(each) for each in program.instructions]
        self.numbers = [makes_number(each) for each in program.instructions]
        self.loads = [each.parts[0] in ("ld", "ldmatrix") for each in program.instructions]
        self.kinds = [each.parts[-1] for each in program.instructions]
        self.registers: set[int] = set()
        self.touched = False  # whether the current instruction has loaded an integer
        self.storing = False  # whether it stores one

    def before(self, values: list[Array | None], named: list[Any], at: int) -> None:
        """Make symbols of the integer bits that a float instruction takes: names for the bits of registers."""
        self.touched = False
        self.storing = bool(self.registers & self.sources[at])
        if self.storing and self.floats[at]:
            for index in self.registers & self.sources[at]:
                if named[index] is None and values[index] is not None:
                    named[index] = symbols(values[index], self.kinds[at])

    def after(self, at: int, mask: Array | None) -> None:
        """Follow the bits into the registers that the instruction wrote."""
        holds = self.touched if self.loads[at] else self.storing
        if holds and not self.floats[at] and not self.numbers[at]:
            self.registers |= self.written[at]
        elif mask is None and self.registers:
            self.registers -= self.written[at]


def symbols(bits: Any, kind: str) -> Any:
    """Return the names of integer bits as floats of a type, in the form of a register."""
    if bits.dtype == np.uint64:
        low, high = (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), (bits >> np.uint64(32))
        return (symbols(low, kind), symbols(high.astype(np.uint32), kind))
    if bits.dtype == np.uint32:
        if kind.startswith(("f16", "bf16")):
            return Word(low=half(bits & np.uint32(0xFFFF)), high=half(bits >> np.uint32(16)))
        return Word(nm.make("integer bits", nm.constant(bits)))
    if bits.dtype == np.uint16:
        return half(bits)
    return None


def half(bits: Array) -> Names:
    """Return the names of 16 bits."""
    return np.asarray(nm.VALUE | nm.make("integer bits of 16", nm.fixed_half(bits)))
