"""Branches on float data that only skip arithmetic: run as selects.

libdevice's log, for one, branches around two instructions for infinities. Such a branch decides no
address and no memory access: every instruction up to the meeting point works on registers of its own
thread and jumps forward only. Each of them then runs under its path condition, as if it had a guard:
a register becomes "new if the path was taken else old", which is what the branch does, bit for bit.
A register that occurs nowhere else in the program needs no condition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobit.certifying.machine.asynchronous import registers_of
from isobit.certifying.machine.opcodes.bitwise import join_predicates
from isobit.certifying.machine.predicate_names import negated
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import Guard, Program, Symbol


@dataclass(frozen=True)
class Condition:
    """The threads that take a path, and the name of the condition in each."""

    mask: Array
    name: Names

    def both(self, other: Condition) -> Condition:
        """Return the condition that both hold."""
        return Condition(self.mask & other.mask, join_predicates("and", self.name, other.name))

    def either(self, other: Condition) -> Condition:
        """Return the condition that one of them holds."""
        return Condition(self.mask | other.mask, join_predicates("or", self.name, other.name))

    def opposite(self) -> Condition:
        """Return the condition that this one does not hold."""
        return Condition(~self.mask, negated(self.name))


def target_of(program: Program, at: int) -> int:
    """Return the instruction that a branch jumps to."""
    label = program.instructions[at].operands[0]
    assert isinstance(label, Symbol)
    return program.labels[label.name]


def is_skip(program: Program, register_only: list[bool], at: int, meet: int) -> bool:
    """Whether the instructions between a branch and its meeting point only compute, and go forward."""
    inside = range(at + 1, meet)
    if meet <= at or meet >= len(program.instructions):
        return False
    for i in range(at, meet):  # the branch itself must go forward too
        if program.instructions[i].parts[0] == "bra":
            if not i < target_of(program, i) <= meet:
                return False
        elif not register_only[i]:
            return False
    branches = (i for i, each in enumerate(program.instructions) if each.parts[0] == "bra")
    return not any(
        i not in inside and i != at and at < target_of(program, i) < meet for i in branches
    )


def local_registers(program: Program, at: int, meet: int) -> frozenset[int]:
    """Return the registers that occur only inside of a skip and are written before they are read."""
    found: set[int] = set()
    first_read: set[int] = set()
    for each in program.instructions[at + 1 : meet]:
        if each.parts[0] == "bra":
            continue
        read = registers_of(each.operands[1:])
        first_read |= read - found
        written = registers_of(each.operands[:1])
        if each.guard is not None:
            first_read |= written - found
        found |= written
    outside: set[int] = set()
    for i, each in enumerate(program.instructions):
        if not at < i < meet:
            outside |= registers_of(each.operands)
        if each.guard is not None:
            outside.add(each.guard.register.index)
    return frozenset(found - first_read - outside)


def replaced_registers(program: Program, at: int, meet: int) -> set[int]:
    """Return the registers that every path of a skip writes before it reads them.

    What they held before the branch is lost in any case, so the first write needs no condition.
    """
    after: dict[int, set[int]] = {meet: set()}  # the registers that all paths from a place replace
    for i in range(meet - 1, at - 1, -1):
        each = program.instructions[i]
        following = [] if each.parts[0] == "bra" and each.guard is None else [after[i + 1]]
        if each.parts[0] == "bra":
            after[i] = set.intersection(*following, after[target_of(program, i)])
        else:
            written = registers_of(each.operands[:1]) if each.guard is None else frozenset()
            after[i] = (after[i + 1] | written) - registers_of(each.operands[1:])
            if each.guard is not None:
                after[i] -= registers_of(each.operands[:1])
        if each.guard is not None:
            after[i] -= {each.guard.register.index}
    return after[at]


def run_skip(machine: State, at: int, meet: int, active: Array | None) -> None:
    """Run the instructions of a skip under their path conditions, up to the meeting point."""
    program = machine.program
    everyone = np.ones(machine.threads, bool) if active is None else active
    start = Condition(everyone, nm.constant_predicate(everyone))
    never = Condition(np.zeros_like(everyone), nm.constant_predicate(np.zeros_like(everyone)))
    local = local_registers(program, at, meet)
    fresh = replaced_registers(program, at, meet)
    order = machine.asynchronous
    arriving: dict[int, Condition] = {}
    path = start
    for i in range(at, meet):
        path = path.either(arriving.pop(i, never))
        instruction = machine.current = program.instructions[i]
        machine.hits[i] += i > at
        if order is not None and order.checked:
            order.before(instruction)
        taken = (
            path if instruction.guard is None else path.both(of_guard(machine, instruction.guard))
        )
        if instruction.parts[0] == "bra":
            target = target_of(program, i)
            arriving[target] = arriving.get(target, never).either(taken)
            path = never if instruction.guard is None else path.both(taken.opposite())
        elif instruction.guard is None and registers_of(instruction.operands[:1]) <= local | fresh:
            machine.guard_names = None
            machine.steps[i](machine, active)
            fresh -= registers_of(instruction.operands[:1])
        else:
            fresh -= registers_of(instruction.operands[:1])
            machine.guard_names = None if nm.is_constant(taken.name).all() else taken.name
            machine.steps[i](machine, taken.mask)


def of_guard(machine: State, guard: Guard) -> Condition:
    """Return the condition that a guard lets a thread execute."""
    made = Condition(machine.bits(guard.register, 1), machine.names_of(guard.register, 1))
    return made.opposite() if guard.negated else made
