"""Short branches as guards, so that a branch over a few register operations may depend on data.

[Note: short branches]
`@%p bra L; a; b; L:` does the same as `@!%p a; @!%p b`, if a and b only use registers of their own thread, none of
them writes %p, and nobody jumps between them. With guards it is no branch: the results are selects, which have names,
and threads stay together. A register that nobody else uses needs no guard, and its name stays plain. `tl.log` needs
all this: libdevice branches over the case of an infinity or NaN.
"""

from __future__ import annotations

from dataclasses import replace

from isobit.compiled.machine.opcodes.table import find
from isobit.compiled.ptx.program import (
    Address,
    Guard,
    Instruction,
    Operand,
    Pair,
    Program,
    Symbol,
    Vector,
)

LONGEST = 32  # instructions


def with_guards(program: Program) -> Program:
    """Return the program with its short branches replaced; every instruction keeps its index."""
    instructions, labels = list(program.instructions), dict(program.labels)
    places = set(program.labels.values())
    for at, branch in enumerate(program.instructions):
        end = end_of(branch, program, at)
        if end is None or any(place in places for place in range(at + 1, end)):
            continue
        body = program.instructions[at + 1 : end]
        guard = branch.guard
        assert guard is not None
        if not all(is_plain(each, guard) for each in body):
            continue
        negated = Guard(guard.register, not guard.negated)
        kept = used_elsewhere(program, at, end)
        for each in body:
            if any(one in kept for one in registers_of(each.operands[0])):
                instructions[each.index] = replace(each, guard=negated)
        labels[f"after instruction {at}"] = at + 1
        onward = (Symbol(f"after instruction {at}"),)
        instructions[at] = replace(branch, guard=None, operands=onward)
    return replace(program, instructions=instructions, labels=labels)


def used_elsewhere(program: Program, at: int, end: int) -> list[Operand]:
    """Return registers whose value before the body, or after it, is used."""
    found = [
        one
        for each in (*program.instructions[:at], *program.instructions[end:])
        for operand in each.operands
        for one in registers_of(operand)
    ]
    written: list[Operand] = []
    for each in program.instructions[at + 1 : end]:
        read = [one for operand in each.operands[1:] for one in registers_of(operand)]
        found += [one for one in read if one not in written]  # in a loop, from the round before
        written += registers_of(each.operands[0])
    return found


def end_of(branch: Instruction, program: Program, at: int) -> int | None:
    """Return where a guarded forward branch of few instructions leads to; None for any other instruction."""
    if branch.parts[0] != "bra" or branch.guard is None:
        return None
    target = branch.operands[0]
    end = program.labels.get(target.name) if isinstance(target, Symbol) else None
    return end if end is not None and at + 1 < end <= at + 1 + LONGEST else None


def is_plain(instruction: Instruction, guard: Guard) -> bool:
    """Return whether an instruction only uses registers of its thread, always, and leaves the guard alone."""
    if instruction.guard is not None or instruction.parts[0] in ("bra", "ret", "exit"):
        return False
    written = registers_of(instruction.operands[0]) if instruction.operands else [guard.register]
    return find(instruction)[1] and guard.register not in written


def registers_of(operand: Operand) -> list[Operand]:
    """Return the registers of an operand."""
    if isinstance(operand, Vector):
        return [one for item in operand.items for one in registers_of(item)]
    if isinstance(operand, Pair):
        return [*registers_of(operand.first), *registers_of(operand.second)]
    return registers_of(operand.base) if isinstance(operand, Address) else [operand]
