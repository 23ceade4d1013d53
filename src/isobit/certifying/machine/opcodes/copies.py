"""Asynchronous copies from global to shared memory (cp.async), fences and prefetches."""

from __future__ import annotations

import numpy as np

from isobit.certifying.machine.opcodes.table import Step, decoder, opcode
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Immediate, Instruction
from isobit.certifying.running.refusals import unknown


@decoder("cp.async.ca", "cp.async.cg")
def copy(instruction: Instruction) -> Step:
    """Decode a copy of 4, 8 or 16 bytes; bytes beyond the source size are zeros."""
    spaces = [part for part in instruction.parts[3:] if not part.startswith("L2::")]
    target, source, size, *more = instruction.operands
    good = isinstance(size, Immediate) and size.value in (4, 8, 16) and len(more) <= 1
    if spaces not in (["shared", "global"], ["shared::cta", "global"]) or not good:
        raise unknown(instruction, "modifier of")
    count = size.value if isinstance(size, Immediate) else 0

    def step(machine: State, mask: Array | None) -> None:
        everyone = np.ones(machine.threads, bool) if mask is None else mask
        live = (
            machine.concrete(more[0]).astype(np.int64) if more else np.full(machine.threads, count)
        )
        live = np.minimum(live, count)
        data, made = machine.load("global", machine.address(source), count, everyone & (live > 0))
        kept = 2 * np.arange(count // 2)[None] < live[:, None]
        if (live % 2).any():
            raise unknown(instruction, "odd source size of")
        data = np.where(kept, data, np.uint16(0))
        if made is not None:
            made = np.where(kept, made, nm.FIXED)
        machine.store_async(machine.address(target), data, made, mask)

    return step


@opcode("cp.async.commit_group")
def commit(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Close a group of copies."""
    machine.everyone(mask)
    if machine.races is not None:
        machine.races.commit()


@opcode("cp.async.wait_group", "cp.async.wait_all")
def wait(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Wait until at most a number of groups are pending."""
    machine.everyone(mask)
    pending = 0
    if instruction.operands:
        pending = int(machine.bits(instruction.operands[0], 32)[0])
    elif machine.races is not None:
        machine.races.commit()
    if machine.races is not None:
        machine.races.wait(instruction, pending)


@opcode("griddepcontrol")
def depend(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Wait for the launches before; letting the next one begin changes nothing here."""
    if "wait" in instruction.parts:
        machine.everyone(mask)
        machine.waited = True


@opcode("fence", "membar", "prefetch", "createpolicy", "discard")
def nothing(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Do nothing: a fence orders one thread's accesses, which lockstep keeps in order."""
    if instruction.parts[0] == "createpolicy":
        machine.write(instruction.operands[0], np.zeros(machine.threads, np.uint64), mask)
