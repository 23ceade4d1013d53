"""Predicates: their names, those that are kept as numbers, and comparisons that a whole launch shares."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from isobit.certifying.machine.opcodes.table import Step
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import (
    WIDTHS,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Special,
)

# Names of predicates.


def negated(name: Names) -> Names:
    """Return the names of "not predicate"."""
    flipped = nm.constant_predicate(1 - (name & np.uint64(1)))
    return np.where(nm.is_constant(name), flipped, nm.make("not", name))


# Predicates that are kept as numbers: `selp 1, 0` of a predicate, compared with zero, is the predicate again.
#
# Triton keeps a predicate in a register of 16 or 32 bits where it has to be moved. Names are hashes and cannot be read
# backwards, so the machine remembers, within a CTA, which predicate such a number stands for.

FLAG_WIDTHS = (16, 32)
# In the state of a CTA: name of the number -> name of the predicate, and whether the number is 0 if it is true.
KEY = "flags"


def remember(machine: State, width: int, made: Any, guard: Names, a: Operand, b: Operand) -> None:
    """Keep the predicate of "a if predicate else b", if one of two constants is zero and the other is not."""
    if not (isinstance(a, Immediate) and isinstance(b, Immediate)) or (a.value == 0) == (
        b.value == 0
    ):
        return
    number = nm.value16(made) if width == 16 else made.value
    fresh = ~np.asarray(nm.is_constant(number))
    stands_for = [(each, a.value == 0) for each in guard[fresh].tolist()]
    machine.state.setdefault(KEY, {}).update(zip(number[fresh].tolist(), stands_for, strict=True))


def recall(machine: State, made: Names, operand: Operand, width: int, *, negate: bool) -> Names:
    """Return the names of "operand != 0" (or "== 0"), where the operand stands for a predicate."""
    known = machine.state.get(KEY)
    if not known:
        return made
    found = [known.get(name) for name in machine.one_name(operand, width).tolist()]
    stands = np.array([each is not None for each in found])
    predicate = np.array([each[0] if each else 0 for each in found], dtype=np.uint64)
    turned = np.array([bool(each and each[1]) != negate for each in found])
    return np.where(stands, np.where(turned, negated(predicate), predicate), made)


# Comparisons of numbers that a whole launch shares: its integer parameters and the size of its grid.
#
# [Note: thresholds inside kernels] A kernel that is given the number of rows may branch on it: `if M > 5000`. The
# branch is executed only with the row counts that were tried. So the machine notes comparisons whose operands come
# from parameters and the grid alone, with their values. If one operand followed the rows and the other is a number
# above all that were seen, the other outcome was never judged, and a larger batch has it.

ARITHMETIC = {"mov", "cvt", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "min", "max"}
ARITHMETIC |= {"div", "rem", "selp", "neg"}
MOST = 64  # values of a comparison that are kept
Compared = tuple[int, int, bool]  # two values and the outcome


def launch_comparisons(program: Program) -> list[int]:
    """Return the integer comparisons whose operands are the same in all programs and threads of a launch."""
    writers: dict[int, list[Instruction]] = {}
    for each in program.instructions:
        if each.operands and isinstance(each.operands[0], Register):
            writers.setdefault(each.operands[0].index, []).append(each)
    shared = {index for index, found in writers.items() if all(map(is_arithmetic, found))}
    while True:
        wrong = {
            index
            for index in shared
            if not all(is_shared(o, shared) for each in writers[index] for o in each.operands[1:])
            and not all(each.opcode.startswith("ld.param") for each in writers[index])
        }
        if not wrong:
            break
        shared -= wrong
    return [
        at
        for at, each in enumerate(program.instructions)
        if each.parts[0] == "setp"
        and each.parts[-1] in WIDTHS
        and each.parts[-1][0] in "sub"
        and len(each.operands) == 3
        and isinstance(each.operands[0], Register)
        and all(is_shared(o, shared) for o in each.operands[1:])
    ]


def is_arithmetic(instruction: Instruction) -> bool:
    """Tell whether an instruction computes an integer from its operands, or loads a parameter."""
    whole = instruction.parts[-1] in WIDTHS and instruction.parts[-1][0] in "sub"
    return instruction.opcode.startswith("ld.param") or (
        whole and instruction.parts[0] in ARITHMETIC and instruction.guard is None
    )


def is_shared(operand: Any, shared: set[int]) -> bool:
    """Tell whether an operand is the same in the whole launch."""
    if isinstance(operand, Special):
        return operand.name.startswith("%nctaid")
    return isinstance(operand, Immediate) or (
        isinstance(operand, Register) and operand.index in shared
    )


def noting(instruction: Instruction, inner: Step, found: set[Compared]) -> Step:
    """Return what runs a comparison and notes its values."""
    target, *operands = instruction.operands
    width = WIDTHS[instruction.parts[-1]]

    def step(machine: State, mask: Array | None) -> None:
        inner(machine, mask)
        if len(found) < MOST and isinstance(target, Register):
            thread = 0 if mask is None else int(np.argmax(mask))
            a, b = (int(machine.bits(each, width)[thread]) for each in operands)
            values = machine.values[target.index]
            if values is not None and (mask is None or mask[thread]):
                found.add((a, b, bool(values[thread])))

    return step


def threshold_above(found: Iterable[Compared]) -> int | None:
    """Return the number that a comparison waits for: above all values that were seen, with one outcome.

    Example:
        >>> threshold_above({(3, 5000, False), (70, 5000, False)})
        5000
        >>> threshold_above({(3, 64, False), (70, 64, True)})
        >>> threshold_above({(256, 1, False)})
    """
    triples = list(found)
    if len({outcome for _, _, outcome in triples}) != 1:
        return None
    for side in (0, 1):
        values = {each[side] for each in triples}
        others = {each[1 - side] for each in triples}
        if len(values) > 1 and len(others) == 1 and (number := min(others)) > max(values):
            return int(number)
    return None
