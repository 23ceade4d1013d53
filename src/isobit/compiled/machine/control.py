"""Control flow: guards, branches that whole warps take, and the end of a CTA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isobit.compiled import names as nm
from isobit.compiled.machine.opcodes.table import Step, decoder
from isobit.compiled.names import Array
from isobit.compiled.ptx.program import Instruction, Symbol
from isobit.compiled.refusals import DataBranchError, DivergentBranchError, refuse

if TYPE_CHECKING:
    from isobit.compiled.machine.machine import Machine


@decoder("bra", "ret", "exit")
def control(instruction: Instruction) -> Step:
    """Return nothing to run: branches are taken by `run_threads`."""

    def step(machine: Machine, mask: Array | None) -> None:
        raise AssertionError(instruction.opcode)

    return step


def guard_mask(machine: Machine, instruction: Instruction, register_only: bool) -> Array:
    """Return the threads that a guard lets execute; refuse a guard that depends on data."""
    guard = instruction.guard
    assert guard is not None
    made = machine.named[guard.register.index]
    if made is not None:
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


def negated(name: nm.Names) -> nm.Names:
    """Return the names of "not predicate"."""
    flipped = nm.constant_predicate(1 - (name & np.uint64(1)))
    return np.where(nm.is_constant(name), flipped, nm.make("not", name))


def run_threads(machine: Machine) -> None:
    """Run the threads of a CTA until all have returned.

    Warps that branch apart run apart: always those with the smallest place in the program, until
    they meet again.
    """
    instructions, steps = machine.program.instructions, machine.steps
    register_only, hits = machine.register_only, machine.hits
    kinds = [{"bra": 1, "ret": 2, "exit": 2}.get(each.parts[0], 0) for each in instructions]
    places: list[tuple[int, Array | None]] = [(0, None)]
    while places:
        at = min(place for place, _ in places)
        together = [mask for place, mask in places if place == at]
        places = [(place, mask) for place, mask in places if place != at]
        active = merged(together)
        if active is not None and active.all():
            active = None
        next_place = min((place for place, _ in places), default=len(instructions) + 1)
        while at < len(instructions):
            instruction = machine.current = instructions[at]
            hits[at] += 1
            mask = active
            machine.guard_names = None
            if instruction.guard is not None:
                mask = guard_mask(machine, instruction, register_only[at])
                if active is not None:
                    mask = mask & active
                    if machine.guard_names is not None:
                        no = nm.constant_predicate(0)
                        machine.guard_names = np.where(active, machine.guard_names, no)
            if not kinds[at]:
                steps[at](machine, mask)
                at += 1
            elif mask is None or (mask.all() if active is None else (mask == active).all()):
                if kinds[at] == 2:
                    break
                target = instruction.operands[0]
                assert isinstance(target, Symbol)
                at = machine.program.labels[target.name]
            elif not mask.any():
                at += 1
            else:
                whole_warps(machine, instruction, mask, active)
                if kinds[at] == 1:
                    target = instruction.operands[0]
                    assert isinstance(target, Symbol)
                    places.append((machine.program.labels[target.name], mask))
                places.append((at + 1, ~mask if active is None else active & ~mask))
                break
            if at >= next_place:
                places.append((at, active))
                break


def merged(masks: list[Array | None]) -> Array | None:
    """Return the threads of several masks together."""
    given = [mask for mask in masks if mask is not None]
    return np.logical_or.reduce(given) if len(given) == len(masks) else None


def whole_warps(
    machine: Machine, instruction: Instruction, mask: Array, active: Array | None
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
