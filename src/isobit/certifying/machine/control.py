"""Control flow: guards, branches that whole warps take, and the end of a CTA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.predicate_names import negated
from isobit.certifying.machine.skips import is_skip, run_skip
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction, Symbol
from isobit.certifying.running.refusals import (
    DataBranchError,
    DivergentBranchError,
    EndlessLoopError,
    refuse,
)

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
    from the branch passes (see reconvergence.py). A return is a jump to the end.
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
