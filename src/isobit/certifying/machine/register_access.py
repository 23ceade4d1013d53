"""How opcodes read and write registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.certifying.machine import registers
from isobit.certifying.machine.naming import Naming
from isobit.certifying.machine.registers import UNSIGNED, Word
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.byte_names import byte_of
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import (
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
)
from isobit.certifying.running.recorded import Recorded
from isobit.certifying.running.refusals import OpcodeError, place, refuse, unknown


class RegisterAccess:
    """What opcodes use to read and write registers."""

    program: Program
    names: bool  # whether values carry names
    threads: int
    values: list[Array | None]  # bits by register
    named: list[Any]  # names by register; see registers.py
    special: dict[str, Array]
    symbols: dict[str, int]  # addresses of variables
    current: Instruction  # the instruction that runs
    guard_names: Names | None  # of its guard, if the guard depends on data
    recorded: Recorded | None
    active: Array | None  # the threads that run, while warps run apart
    facts: dict[str, str]  # what a reader of the result must know -> first place

    # ---- registers ------------------------------------------------------------------------------
    def bits(self, operand: Operand, width: int) -> Array:
        """Return the bits of an operand for all threads, as unsigned integers of this width."""
        kind = UNSIGNED[width]
        if isinstance(operand, Register):
            values = self.values[operand.index]
            if values is None:
                values = self.never_written(operand)
            if operand.width != width:
                if (operand.width == 1) != (width == 1) or operand.width < width:
                    raise unknown(self.current, f"register {operand.name} too narrow for")
                return values.astype(kind)
            return values
        if isinstance(operand, Immediate):
            if width == 1:
                return np.full(self.threads, bool(operand.value))
            if operand.kind != "int" and int(operand.kind[1:]) != width:
                raise unknown(self.current, f"a constant of type {operand.kind} in")
            return np.full(self.threads, operand.value & ((1 << width) - 1), kind)
        if isinstance(operand, Special):
            return self.special_register(operand.name).astype(kind)
        if isinstance(operand, Symbol) and operand.name in self.symbols:
            return np.full(self.threads, self.symbols[operand.name], kind)
        raise unknown(self.current, f"operand {operand} of")

    def never_written(self, register: Register) -> Array:
        """Return zeros, with names that equal no others, for a register that nothing has written."""
        values = np.zeros(self.threads, UNSIGNED[register.width])
        self.values[register.index] = values
        if self.names:
            made = registers.unknown_register(register.width, self.threads)
            self.named[register.index] = made
        self.fact("reads a register that was never written")
        return values

    def tainted(self, operand: Operand) -> bool:
        """Tell whether an operand depends on float data in some thread."""
        if not isinstance(operand, Register):
            return False
        if self.values[operand.index] is None:
            self.never_written(operand)
        made = self.named[operand.index]
        if made is None or self.active is None:
            return made is not None
        # while warps run apart, what the other warps hold does not matter
        return not bool(registers.fixed_threads(operand.width, made)[self.active].all())

    def names_of(self, operand: Operand, width: int) -> Any:
        """Return names in the form of a register of this width; constants if it is concrete."""
        if self.tainted(operand):
            assert isinstance(operand, Register)
            if operand.width != width:
                raise unknown(self.current, f"width of register {operand.name} in")
            return self.named[operand.index]
        return registers.constant_names(self.bits(operand, width), width)

    def word(self, operand: Operand) -> Names:
        """Return the names of 32-bit values, one per thread."""
        made: Word = self.names_of(operand, 32)
        if self.recorded is not None and not made.whole:
            low, high = made.halves
            widened = (low == nm.FIXED) & (high < nm.FIXED)
            if widened.any():
                names = made.value[widened]
                parts = [nm.value16(high[widened])]
                self.recorded.add("widen bf16", names, parts, self.current)
            joined = ~widened & (made.value != low & nm.NAME)  # of halves of different values
            if joined.any():
                rest = [low[joined], high[joined]]
                self.recorded.add("join", made.value[joined], rest, self.current)
        return made.value

    def halves(self, operand: Operand) -> tuple[Names, Names]:
        """Return the lower and upper halves of a 32-bit operand."""
        made: Word = self.names_of(operand, 32)
        return made.halves

    def half(self, operand: Operand) -> Names:
        """Return the halves of a 16-bit operand."""
        made: Names = self.names_of(operand, 16)
        return made

    def write(self, target: Operand, bits: Array, mask: Array | None, made: Any = None) -> None:
        """Write a register in the threads of the mask.

        Args:
            target: a register, or `_`.
            bits: one value per thread, of the register's width.
            mask: the threads that execute; all if None.
            made: names in the form of the register's width; None if no thread depends on data.
        """
        if isinstance(target, Sink):
            return
        if not isinstance(target, Register):
            raise unknown(self.current, f"target {target} of")
        index, width = target.index, target.width
        kind = UNSIGNED[width]
        if bits.dtype != kind:
            bits = bits.astype(kind)
        if bits.shape != (self.threads,):
            bits = np.broadcast_to(bits, (self.threads,))
        if mask is None:
            self.values[index] = bits
            self.named[index] = made if self.names else None
            return
        old = self.values[index]
        if old is None:
            old = np.zeros(self.threads, kind)
            if self.names:
                self.named[index] = registers.unknown_register(width, self.threads)
        if self.names and (made is not None or self.named[index] is not None):
            new = registers.constant_names(bits, width) if made is None else made
            before = self.named[index]
            if before is None:
                before = registers.constant_names(old, width)
            self.named[index] = registers.normal(
                width, registers.merge(width, mask, self.guard_names, new, before)
            )
        elif self.guard_names is not None:
            new, before = (registers.constant_names(each, width) for each in (bits, old))
            self.named[index] = registers.merge(width, mask, self.guard_names, new, before)
        self.values[index] = np.where(mask, bits, old)

    # ---- names ----------------------------------------------------------------------------------
    def make(self, name: Naming, operands: Sequence[Names], bits: Array | None) -> Names:
        """Return the names of results, and record the operation if the machine records."""
        made = name(operands, bits)
        if self.recorded is not None:
            self.recorded.add(name.operation, made, operands, self.current)
        return made

    def opaque(
        self, name: Naming, sources: Sequence[tuple[Operand, int]], bits: Array, width: int
    ) -> Any:
        """Return the names of an operation that is known by its operands only.

        Args:
            name: the operation.
            sources: operands with the width that each is read with.
            bits: the results, which name the threads whose operands are constants.
            width: of the result: 1, 16, 32 or 64.

        Returns:
            Names in the form of a register, or None if no operand depends on data.
        """
        if not self.names or (name.folds and not any(self.tainted(each) for each, _ in sources)):
            return None
        operands = [self.one_name(each, wide) for each, wide in sources]
        made = self.make(name, operands, None)
        if name.folds:
            known = np.logical_and.reduce([nm.is_constant(each) for each in operands])
        else:
            known = np.zeros(self.threads, bool)
        return registers.normal(width, registers.from_names(width, made, known, bits))

    def one_name(self, operand: Operand, width: int) -> Names:
        """Return one name per thread for an operand of any width; constants keep their flag."""
        if width == 8:
            made = self.names_of(operand, getattr(operand, "width", 16))
            return byte_of(made.halves[0] if isinstance(made, Word) else made, 0)
        made = self.names_of(operand, width)
        if width == 1:
            return np.asarray(made)
        if width == 16:
            return nm.value16(made)
        return made.value if width == 32 else registers.name64(made)

    def widened(self, operand: Operand, kind: str) -> Names:
        """Return the names of the fp32 values of a 16-bit operand."""
        half = self.half(operand)
        exact = nm.constant(ar.widen(self.bits(operand, 16), kind).view(np.uint32))
        made = nm.widen(kind, nm.value16(half))
        if self.recorded is not None:
            self.recorded.add(f"widen {kind}", made, [nm.value16(half)], self.current)
        return np.where(nm.half_is_fixed(half), exact, made)

    def special_register(self, name: str) -> Array:
        """Return a special register; clocks and places on the chip are refused."""
        if name not in self.special:
            raise refuse(
                OpcodeError,
                self.current,
                expected="a special register that every launch has alike",
                received=name,
                remedy="a certified kernel cannot depend on clocks or on where it runs",
            )
        return self.special[name]

    def fact(self, what: str) -> None:
        """Record a fact that a reader of the result must know, with its first place."""
        if what not in self.facts:
            self.facts[what] = place(self.current)
