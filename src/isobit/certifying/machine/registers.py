"""The register file: for each register the bits of all threads, and the names of what they hold.

Names of a register by its width; None means that no thread's value depends on float data:
  1 bit    one name per thread (a predicate)
  16 bits  one half per thread
  32 bits  a `Word`
  64 bits  a tuple of two `Word`s, the lower first
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.certifying.machine.asynchronous import RegisterUse
from isobit.certifying.machine.naming import Naming
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names, byte_of
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

UNSIGNED: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64, 1: np.bool_}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}

_unknown = [secrets.randbits(60)]


def unknown_names(count: int) -> Names:
    """Return names that equal no other names: of what was never written."""
    start = _unknown[0]
    _unknown[0] += count
    return nm.mix(nm.tag("unknown"), np.arange(count, dtype=np.uint64) + np.uint64(start))


class Word:
    """The names of a 32-bit register: of the whole values, or of their two halves."""

    __slots__ = ("_high", "_low", "_powers", "_value", "whole")

    def __init__(
        self, value: Names | None = None, low: Names | None = None, high: Names | None = None
    ) -> None:
        self._value, self._low, self._high = value, low, high
        self._powers: dict[int, tuple[Names, Names]] = {}
        self.whole = low is None  # made from whole values, so that halves add nothing

    @classmethod
    def constant(cls, bits: Array) -> Word:
        """Return the names of constants."""
        return cls(nm.constant(bits))

    @property
    def value(self) -> Names:
        """The names of the 32-bit values."""
        if self._value is None:
            assert self._low is not None
            assert self._high is not None
            self._value = nm.join(self._low, self._high)
        return self._value

    @property
    def halves(self) -> tuple[Names, Names]:
        """The lower and the upper halves."""
        if self._low is None or self._high is None:
            self._low, self._high = nm.split(self.value)
        return self._low, self._high

    def elements(self, bits: int) -> Names:
        """Return the names of the elements of 8, 16 or 32 bits, [threads, elements]."""
        if bits == 32:
            return self.value[:, None]
        if bits == 16:
            return np.stack([nm.value16(half) for half in self.halves], -1)
        return np.stack([byte_of(half, i) for half in self.halves for i in (0, 1)], -1)

    def powers(self, bits: int) -> tuple[Names, Names]:
        """Return `nm.powers` of the elements; kept, as a fragment is used by several products."""
        if bits not in self._powers:
            self._powers[bits] = nm.powers(self.elements(bits))
        return self._powers[bits]

    def take(self, lanes: Array) -> Word:
        """Return the names that the threads `lanes` hold."""
        if self.whole:
            return Word(self.value[lanes])
        low, high = self.halves
        return Word(low=low[lanes], high=high[lanes])

    def fixed(self) -> Array:
        """Tell which threads hold a constant."""
        if self.whole:
            return nm.is_constant(self.value)
        low, high = self.halves
        return np.asarray((low & high) >= nm.FIXED)


def where(mask: Array, new: Word, old: Word) -> Word:
    """Return `new` in the threads of `mask` and `old` in the others."""
    if new.whole and old.whole:
        return Word(np.where(mask, new.value, old.value))
    (a, b), (c, d) = new.halves, old.halves
    return Word(low=np.where(mask, a, c), high=np.where(mask, b, d))


def choose(predicate: Names, new: Word, old: Word) -> Word:
    """Return the names of "new if predicate else old"."""
    if new.whole and old.whole:
        return Word(nm.select(predicate, new.value, old.value))
    (a, b), (c, d) = new.halves, old.halves
    low, high = select_half(predicate, a, c), select_half(predicate, b, d)
    one = nm.is_one_value(a, b) & nm.is_one_value(c, d)  # halves that were parted and joined again
    if one.any():
        first, second = nm.split(nm.select(predicate, new.value, old.value))
        low, high = np.where(one, first, low), np.where(one, second, high)
    return Word(low=low, high=high)


def select_half(predicate: Names, a: Names, b: Names) -> Names:
    """Return the halves of "a if predicate else b"."""
    made = nm.VALUE | nm.make("select half", predicate, a, b)
    known, true = nm.is_constant(predicate), (predicate & np.uint64(1)).astype(bool)
    return np.where(known, np.where(true, a, b), np.where(a == b, a, made))


def constant_names(bits: Array, width: int) -> Any:
    """Return the names of constants in the form of a register of this width."""
    if width == 1:
        return nm.constant_predicate(bits)
    if width == 16:
        return nm.fixed_half(bits)
    if width == 32:
        return Word.constant(bits)
    return (Word.constant(bits & np.uint64(0xFFFFFFFF)), Word.constant(bits >> np.uint64(32)))


def merge(width: int, mask: Array, guard: Names | None, new: Any, old: Any) -> Any:
    """Return the names after a write under a mask, or under a guard that depends on data."""
    if width == 64:
        return tuple(merge(32, mask, guard, a, b) for a, b in zip(new, old, strict=True))
    if width == 32:
        return where(mask, new, old) if guard is None else choose(guard, new, old)
    if guard is None:
        return np.where(mask, new, old)
    if width == 16:
        return select_half(guard, new, old)
    return nm.select(guard, new, old)


def fixed_threads(width: int, made: Any) -> Array:
    """Tell which threads hold a constant."""
    if width == 64:
        return np.asarray(made[0].fixed() & made[1].fixed())
    if width == 32:
        return np.asarray(made.fixed())
    return np.asarray(made >= nm.FIXED) if width == 16 else nm.is_constant(made)


def normal(width: int, made: Any) -> Any:
    """Return None if all threads hold constants, else the names themselves."""
    if width == 1:
        return None if nm.is_constant(made).all() else made
    if width == 16:
        return None if (made >= nm.FIXED).all() else made
    if width == 32:
        return None if made.fixed().all() else made
    return None if all(word.fixed().all() for word in made) else made


def unknown_register(width: int, threads: int) -> Any:
    """Return the names of a register that was never written."""
    if width == 64:
        return (Word(unknown_names(threads)), Word(unknown_names(threads)))
    return Word(unknown_names(threads)) if width == 32 else unknown_names(threads)


def name64(words: tuple[Word, Word]) -> Names:
    """Return one name per 64-bit value; a constant keeps the flag, with a hash of its bits."""
    low, high = words[0].value, words[1].value
    fixed = nm.is_constant(low & high)
    made = nm.pair(low, high)
    return np.where(fixed, made | nm.CONSTANT, made)


def from_names(width: int, made: Names, known: Array, bits: Array) -> Any:
    """Return names of results in the form of a register; `known` threads hold constants."""
    if width == 1:
        return np.where(known, nm.constant_predicate(bits), made)
    if width == 16:
        return np.where(known, nm.fixed_half(bits), nm.VALUE | made)
    if width == 32:
        return Word(np.where(known, nm.constant(bits), made))
    wide = bits.astype(np.uint64)
    parts = (wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32))
    return tuple(
        Word(np.where(known, nm.constant(part), nm.make("word", made, np.uint64(i))))
        for i, part in enumerate(parts)
    )


# How opcodes read and write registers.


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
            made = unknown_register(register.width, self.threads)
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
        return not bool(fixed_threads(operand.width, made)[self.active].all())

    def names_of(self, operand: Operand, width: int) -> Any:
        """Return names in the form of a register of this width; constants if it is concrete."""
        if self.tainted(operand):
            assert isinstance(operand, Register)
            if operand.width != width:
                raise unknown(self.current, f"width of register {operand.name} in")
            return self.named[operand.index]
        return constant_names(self.bits(operand, width), width)

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
                self.named[index] = unknown_register(width, self.threads)
        if self.names and (made is not None or self.named[index] is not None):
            new = constant_names(bits, width) if made is None else made
            before = self.named[index]
            if before is None:
                before = constant_names(old, width)
            self.named[index] = normal(width, merge(width, mask, self.guard_names, new, before))
        elif self.guard_names is not None:
            new, before = (constant_names(each, width) for each in (bits, old))
            self.named[index] = merge(width, mask, self.guard_names, new, before)
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
        return normal(width, from_names(width, made, known, bits))

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
        return made.value if width == 32 else name64(made)

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


# Integers whose bits are used as floats: packed weights, bf16 that arrives as int16.
#
# [Note: integer bits]
# Integers of memory are values: a kernel may index and branch by them, so they carry no name, and what is computed from
# them is folded. Bits of a float that arrive as an integer would be folded, too, and two orders of addition that round
# alike on these values would be one expression. So the machine follows which registers hold bits of an integer tensor,
# through moves, shuffles, bit operations and memory; where a float instruction takes such a register, its bits become
# symbols, one for each value, and nothing of them is folded. A conversion (cvt.rn.f32.s32) makes an ordinary number.

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
