"""Predicates that are kept as bits of numbers: which predicate each bit is, and how it is found again.

[Note: packed predicates]
Compilers keep predicates in numbers where they move them: `selp 1, 0` of a predicate, compared with zero later, is the
predicate again. LLVM packs 16 or 64 of them into one number, with shifts and `or`, and takes them out with a shift and
`and 1`. Names are hashes and cannot be read backwards: the number's name has all of them in it, and a bit that is taken
out would be named by its neighbours, too. A right kernel would then have another name in each place.

So the machine remembers, within a CTA, for the name of such a number what each of its bits is: zero, one, a predicate
or its opposite. What moves bits without computing with them moves these, too. Where a comparison asks for a number in
which one predicate alone is left, its outcome is that predicate, its opposite or a constant. All of it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine.opcodes.table import Step
from isobit.certifying.machine.predicates import negated
from isobit.certifying.machine.registers import UNSIGNED, name64
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import WIDTHS, Immediate, Instruction, Operand, Register

KEPT = (
    1 << 17
)  # numbers before all are forgotten: then a bit has a name of its own, which may tell equal values apart
WORDS = (16, 32, 64)  # bits of a number that is followed
FALSE, TRUE = nm.constant_predicate(0), nm.constant_predicate(1)
OPPOSITE = np.uint64(1 << 63)  # marks the opposite of a predicate; names have 62 bits
KEY = "packed predicates"  # in the state of a CTA: the name of a number -> what its bits are, the lowest first
Rows = Array  # [threads, width]: names of predicates


def opposite(bits: Rows) -> Rows:
    """Return what the bits of a number are after all were flipped."""
    return np.asarray(bits ^ np.where(nm.is_constant(bits), np.uint64(1), OPPOSITE))


def constants(numbers: Array, width: int) -> Rows:
    """Return what the bits of numbers are that depend on no data."""
    places = np.arange(width, dtype=np.uint64)
    return nm.constant_predicate((numbers.astype(np.uint64)[:, None] >> places) & np.uint64(1))


def keep(machine: State, names: Names, bits: Rows, known: Array) -> None:
    """Remember what the bits of numbers are, in the threads where it is known."""
    fresh = known & ~nm.is_constant(names)
    table = machine.state.setdefault(KEY, {})
    if len(table) > KEPT:
        table.clear()
    table.update(zip(names[fresh].tolist(), bits[fresh], strict=True))


def pack(machine: State, width: int, made: Any, predicate: Names, a: Operand, b: Operand) -> None:
    """Remember the bits of "a if predicate else b" of two constants, whose names are `made`."""
    if width in WORDS and isinstance(a, Immediate) and isinstance(b, Immediate):
        x, y = (constants(machine.bits(each, width), width) for each in (a, b))
        chosen = np.where(x == TRUE, predicate[:, None], opposite(predicate)[:, None])
        everyone = np.ones(machine.threads, bool)
        keep(machine, one_name(width, made), np.where(x == y, x, chosen), everyone)


def one_name(width: int, made: Any) -> Names:
    """Return one name per thread of a register that holds a number."""
    if width == 16:
        return nm.value16(made)
    return name64(made) if width == 64 else np.asarray(made.value)


def bits_of(machine: State, operand: Operand, width: int) -> tuple[Rows, Array]:
    """Return what the bits of an operand are, and in which threads that is known."""
    bits = constants(machine.bits(operand, width), width)
    if not machine.tainted(operand):
        return bits, np.ones(machine.threads, bool)
    names, table = machine.one_name(operand, width), machine.state[KEY]
    known = nm.is_constant(names)
    for thread in np.flatnonzero(~known).tolist():
        found = table.get(int(names[thread]))
        if found is not None and len(found) == width:
            bits[thread], known[thread] = found, True
    return bits, known


def unpack(
    machine: State,
    made: Names,
    compare: Callable[[Array, Array], Array],
    operands: tuple[Operand, Operand],
    width: int,
) -> Names:
    """Return the names of a comparison: its predicate, where the number has one predicate and constants.

    Args:
        machine: the machine, in the middle of a CTA.
        made: the names that the comparison has otherwise.
        compare: computes its outcome from two arrays of bits.
        operands: the number and what it is compared with.
        width: of both.
    """
    number, other = operands
    if width not in WORDS or not machine.state.get(KEY) or machine.tainted(other):
        return made
    bits, known = bits_of(machine, number, width)
    free = ~nm.is_constant(bits)
    predicate = bits[np.arange(len(bits)), free.argmax(1)] & ~OPPOSITE
    known &= (~free | ((bits & ~OPPOSITE) == predicate[:, None])).all(1)
    against = machine.bits(other, width)
    outcomes = []
    for truth in (False, True):  # of the predicate
        ones = np.where(free, (bits < OPPOSITE) == truth, bits == TRUE)
        weights = np.uint64(1) << np.arange(width, dtype=np.uint64)
        numbers = (ones * weights).sum(1, dtype=np.uint64).astype(UNSIGNED[width])
        outcomes.append(compare(numbers, against))
    if_false, if_true = outcomes
    # a predicate that is taken for a constant is no longer followed, so what runs must agree
    known &= (if_true != if_false) | (if_true == compare(machine.bits(number, width), against))
    found = np.where(if_true, predicate, negated(predicate))
    found = np.where(if_true == if_false, nm.constant_predicate(if_true), found)
    return np.where(known, found, made)


# How instructions move bits.

Move = Callable[..., Rows]


def both(a: Rows, b: Rows) -> Rows:
    """Return the bits of "a and b"."""
    made = nm.make("and packed", *nm.ordered(a, b))
    made = np.where((b == TRUE) | (a == b), a, np.where(a == TRUE, b, made))
    return np.where((a == FALSE) | (b == FALSE), FALSE, made)


def either(a: Rows, b: Rows) -> Rows:
    """Return the bits of "a or b"."""
    return opposite(both(opposite(a), opposite(b)))


def differ(a: Rows, b: Rows) -> Rows:
    """Return the bits of "a xor b"."""
    made = nm.make("xor packed", *nm.ordered(a, b))
    made = np.where(nm.is_constant(b), np.where(b == TRUE, opposite(a), a), made)
    made = np.where(nm.is_constant(a), np.where(a == TRUE, opposite(b), b), made)
    return np.where(a == b, FALSE, made)


LOGIC: dict[str, Move] = {"and": both, "or": either, "xor": differ, "not": opposite}


def move_of(instruction: Instruction) -> tuple[Move, int, int] | None:
    """Return how an instruction moves bits, with the widths that it reads and writes; None for any other."""
    parts, operands = instruction.parts, instruction.operands
    if parts[0] == "cvt" and len(parts) == 3:
        to, source = parts[1:]
        if to[0] in "su" and source[0] in "su":
            wide, extend = WIDTHS[to], source[0] == "s"
            return lambda a: resized(a, wide, extend), WIDTHS[source], wide
    if len(parts) != 2 or parts[1][0] not in "sub" or parts[1] not in WIDTHS:
        return None
    width = WIDTHS[parts[1]]
    if parts[0] in LOGIC:
        return LOGIC[parts[0]], width, width
    if parts[0] in ("shl", "shr") and isinstance(operands[2], Immediate):
        count, extend = operands[2].value, parts[1][0] == "s"
        if not 0 <= count < width:
            return None
        if parts[0] == "shl":
            return lambda a: raised(a, count), width, width
        return lambda a: resized(a[:, count:], width, extend), width, width
    return None


def raised(bits: Rows, count: int) -> Rows:
    """Return bits moved up by a number of places, with zeros below."""
    zeros = np.full((len(bits), count), FALSE)
    return np.concatenate([zeros, bits[:, : bits.shape[1] - count]], 1)


def resized(bits: Rows, width: int, extend: bool) -> Rows:
    """Return the lowest bits; those that are missing are zeros, or the uppermost one if it extends."""
    top = bits[:, -1:] if extend else np.full((len(bits), 1), FALSE)
    missing = max(0, width - bits.shape[1])
    return np.concatenate([bits[:, :width], np.repeat(top, missing, 1)], 1)


def following(instruction: Instruction, inner: Step) -> Step:
    """Return what runs an instruction and moves the predicates in its operands with their bits."""
    found = move_of(instruction)
    if found is None or not {found[1], found[2]} <= set(WORDS):
        return inner
    (move, width, out), (target, *operands) = found, instruction.operands
    # the amount of a shift is a number in `move`
    sources = operands[:1] if instruction.parts[0] in ("shl", "shr") else operands
    if not isinstance(target, Register) or target.width != out:
        return inner

    def step(machine: State, mask: Array | None) -> None:
        given = []
        if machine.state.get(KEY) and any(map(machine.tainted, sources)):
            given = [bits_of(machine, each, width) for each in sources]  # the target may be one
        inner(machine, mask)
        # a guard that depends on data makes another name, of what was there before, too
        if given and machine.guard_names is None and machine.tainted(target):
            known = np.logical_and.reduce([each for _, each in given])
            if mask is not None:
                known &= mask
            if known.any():
                moved = move(*(bits for bits, _ in given))
                keep(machine, machine.one_name(target, out), moved, known)

    return step
