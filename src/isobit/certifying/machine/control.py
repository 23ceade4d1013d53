"""Control flow: guards, branches that whole warps take, and the end of a CTA."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from isobit.certifying.machine.asynchronous import registers_of
from isobit.certifying.machine.opcodes.integers import join_predicates
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.predicates import negated
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx import Program, Symbol
from isobit.certifying.ptx.program import Guard, Instruction
from isobit.certifying.running.refusals import (
    DataBranchError,
    DivergentBranchError,
    EndlessLoopError,
    refuse,
)

# Where threads that branch apart meet again: the immediate post-dominator of each branch.
#
# Triton lets one warp issue the instructions of sm_100's tensor core: the other warps branch around them. The
# machine runs both sides, one after the other, each with its threads, until the instruction that every path from
# the branch to the end of the kernel passes first.

EXIT = ("ret", "exit", "trap")


def successors(program: Program, index: int) -> list[int]:
    """Return the instructions that may follow one; the number of instructions stands for the end."""
    instruction, end = program.instructions[index], len(program.instructions)
    following = [] if instruction.guard is None else [index + 1]
    if instruction.parts[0] in EXIT:
        return [*following, end]
    if instruction.parts[0] == "bra":
        target = instruction.operands[0]
        assert isinstance(target, Symbol)
        return [*following, program.labels[target.name]]
    return [index + 1]


def meeting_points(program: Program) -> dict[int, int]:
    """Return for each guarded branch the instruction where its two sides meet.

    The method is that of Cooper, Harvey and Kennedy ("A Simple, Fast Dominance Algorithm") on the reversed
    graph of blocks: straight lines of instructions are one block.
    """
    end = len(program.instructions)
    starts = {0, end, *program.labels.values()}
    for index, instruction in enumerate(program.instructions):
        if instruction.parts[0] in ("bra", *EXIT):
            starts.add(index + 1)
    firsts = sorted(starts)
    last_of = {a: b - 1 for a, b in itertools.pairwise(firsts)}
    edges = {first: successors(program, last) for first, last in last_of.items()}
    order = _postorder_to(end, edges)
    rank = {block: i for i, block in enumerate(order)}
    after: dict[int, int] = {end: end}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [each for each in edges[block] if each in after]
            meet = known[0]
            for each in known[1:]:
                meet = _common(meet, each, after, rank)
            if after.get(block) != meet:
                after[block], changed = meet, True
    return {
        last: after[first]
        for first, last in last_of.items()
        if first in after and len(edges[first]) > 1
    }


def _common(a: int, b: int, after: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = after[a]
        while rank[b] < rank[a]:
            b = after[b]
    return a


def _postorder_to(end: int, edges: dict[int, list[int]]) -> list[int]:
    """Return the blocks that reach the end, in postorder of a walk against the edges."""
    before: dict[int, list[int]] = {}
    for block, following in edges.items():
        for each in following:
            before.setdefault(each, []).append(block)
    order, seen = [], {end}
    stack = [(end, iter(before.get(end, ())))]
    while stack:
        block, rest = stack[-1]
        for each in rest:
            if each not in seen:
                seen.add(each)
                stack.append((each, iter(before.get(each, ()))))
                break
        else:
            order.append(block)
            stack.pop()
    return order


# Branches on float data that only skip arithmetic: run as selects.
#
# libdevice's log, for one, branches around two instructions for infinities. Such a branch decides no
# address and no memory access: every instruction up to the meeting point works on registers of its own
# thread and jumps forward only. Each of them then runs under its path condition, as if it had a guard:
# a register becomes "new if the path was taken else old", which is what the branch does, bit for bit.
# A register that occurs nowhere else in the program needs no condition.


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


LOOKED_AT = 1024  # iterations of a loop after which it is looked at whether anything changes


@decoder("bra", "ret", "exit")
def control(instruction: Instruction) -> Step:
    """Return nothing to run: branches are taken by `run_threads`."""

    def step(machine: State, mask: Array | None) -> None:
        raise AssertionError(instruction.opcode)

    return step


def guard_mask(machine: State, instruction: Instruction, register_only: bool) -> Array:
    """Return the threads that a guard lets execute; refuse a guard that depends on data."""
    guard = instruction.guard
    assert guard is not None
    made = machine.named[guard.register.index]
    if made is not None and machine.tainted(guard.register):
        if not register_only:
            raise refuse(
                DataBranchError,
                instruction,
                expected="a branch or guard that does not depend on float data",
                received=f"predicate {guard.register.name}, computed from float data",
                remedy="use tl.where on values instead of a branch or a mask made from data",
            )
        machine.guard_names = negated(made) if guard.negated else made
    values = machine.bits(guard.register, 1)
    return ~values if guard.negated else values


def is_same(before: list[Array | None], now: list[Array | None]) -> bool:
    """Tell whether all registers hold what they held an iteration ago."""
    return len(before) == len(now) and all(
        a is b or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(before, now, strict=True)
    )


def endless(machine: State, received: str) -> Exception:
    """Return the error for a program that does not end."""
    return refuse(
        EndlessLoopError,
        machine.current,
        expected="programs that end by themselves",
        received=received,
        remedy="a program may not wait for another one, for a flag or a lock: use two launches; and keep sizes small",
    )


@dataclass
class Apart:
    """Warps that branched apart: where they meet, who meets there, and the sides still to run."""

    meet: int
    active: Array | None
    waiting: list[tuple[int, Array]]


def run_threads(machine: State) -> None:
    """Run the threads of a CTA until all have returned.

    Warps that branch apart run apart, one side after the other, until the place that every path
    from the branch passes (see below). A return is a jump to the end.
    """
    instructions, steps = machine.program.instructions, machine.steps
    register_only, hits = machine.register_only, machine.hits
    kinds = [{"bra": 1, "ret": 2, "exit": 2}.get(each.parts[0], 0) for each in instructions]
    order = machine.asynchronous
    before = order.before if order is not None and order.checked else None
    end, at, active = len(instructions), 0, None
    apart: list[Apart] = []
    left, seen = machine.step_limit, list[Array | None]()
    integers = machine.integer_bits
    while True:
        while apart and at == apart[-1].meet:
            if apart[-1].waiting:
                at, active = apart[-1].waiting.pop()
            else:
                active = apart.pop().active
        if at >= end:
            return
        instruction = machine.current = instructions[at]
        hits[at] += 1
        left -= 1
        if left < 0:
            raise endless(machine, f"a loop that goes on after {machine.step_limit:,} instructions")
        mask = machine.active = active
        machine.guard_names = None
        if instruction.guard is not None:
            if kinds[at] == 1 and machine.tainted(instruction.guard.register):
                meet = machine.meeting_points.get(at, end)
                if is_skip(machine.program, register_only, at, meet):
                    machine.fact("a branch on float data skips arithmetic only: run as a select")
                    run_skip(machine, at, meet, active)
                    at = meet
                    continue
            mask = guard_mask(machine, instruction, register_only[at])
            if active is not None:
                mask = mask & active
                if machine.guard_names is not None:
                    no = nm.constant_predicate(0)
                    machine.guard_names = np.where(active, machine.guard_names, no)
        if not kinds[at]:
            if before is not None:
                before(instruction)
            if integers is not None:
                integers.before(machine.values, machine.named, at)
                steps[at](machine, mask)
                integers.after(at, mask)
            else:
                steps[at](machine, mask)
            at += 1
            continue
        target = end
        if kinds[at] == 1:
            label = instruction.operands[0]
            assert isinstance(label, Symbol)
            target = machine.program.labels[label.name]
        if mask is None or (mask.all() if active is None else (mask == active).all()):
            if target <= at and hits[at] % LOOKED_AT < 2:
                if hits[at] % LOOKED_AT and is_same(seen, machine.values):
                    raise endless(machine, "a loop in which nothing changes")
                seen = list(machine.values)
            at = target
        elif not mask.any():
            at += 1
        else:
            whole_warps(machine, instruction, mask, active)
            apart.append(Apart(machine.meeting_points[at], active, [(target, mask)]))
            active = ~mask if active is None else active & ~mask
            at += 1


def whole_warps(
    machine: State, instruction: Instruction, mask: Array, active: Array | None
) -> None:
    """Refuse a branch that the threads of one warp do not take alike."""
    warps = mask.reshape(-1, 32)
    other = (~mask if active is None else active & ~mask).reshape(-1, 32)
    apart = warps.any(1) & other.any(1)
    if apart.any():
        warp = int(np.flatnonzero(apart)[0])
        thread, beside = (32 * warp + int(np.flatnonzero(each[warp])[0]) for each in (warps, other))
        raise refuse(
            DivergentBranchError,
            instruction,
            expected="a branch that all threads of a warp take alike",
            received=f"thread {thread} takes it and thread {beside} does not",
            remedy="use masks (tl.where, mask=) instead of a branch that depends on the thread",
        )
