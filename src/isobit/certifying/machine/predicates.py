"""Predicates: names of their opposites, and comparisons that a whole launch shares."""

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
    Program,
    Register,
    Special,
)

# Names of predicates.


def negated(name: Names) -> Names:
    """Return the names of "not predicate"."""
    flipped = nm.constant_predicate(1 - (name & np.uint64(1)))
    return np.where(nm.is_constant(name), flipped, nm.make("not", name))


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
