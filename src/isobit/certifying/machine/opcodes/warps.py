"""Instructions across the threads of a warp or a CTA: barriers, shuffles, votes."""

from __future__ import annotations

from typing import Any

import numpy as np

from isobit.certifying.machine.naming import SetNaming
from isobit.certifying.machine.opcodes.floats import extreme
from isobit.certifying.machine.opcodes.table import Step, decoder, opcode
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction, Pair
from isobit.certifying.running.refusals import DataBranchError, refuse, unknown


@opcode("bar.sync", "barrier.sync", "barrier.cta.sync")
def barrier(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Wait for all threads of the CTA."""
    machine.everyone(mask)
    if len(instruction.operands) > 1:
        count = int(machine.concrete(instruction.operands[1])[0])
        if count != machine.threads:
            raise unknown(instruction, "barrier of some threads:")
    if machine.races is not None:
        machine.races.barrier()
    elif "mbarriers" in machine.state:
        machine.state["mbarriers"].synchronise()


@opcode("bar.warp.sync")
def warp_barrier(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Wait for the threads of each warp."""
    machine.whole_warps(mask)
    machine.full_warp(instruction.operands[0])
    if machine.races is not None:
        machine.races.warp_barrier(mask)


@decoder("shfl.sync")
def shuffle(instruction: Instruction) -> Step:
    """Decode a shuffle: each thread reads a register of another thread of its warp."""
    mode, kind = instruction.parts[2:]
    if mode not in ("bfly", "idx", "up", "down") or kind != "b32" or len(instruction.parts) != 4:
        raise unknown(instruction, "modifier of")
    target, source, by, clamp, members = instruction.operands
    predicate = target.second if isinstance(target, Pair) else None
    register = target.first if isinstance(target, Pair) else target

    def step(machine: State, mask: Array | None) -> None:
        machine.whole_warps(mask)
        machine.full_warp(members)
        lane = np.arange(machine.threads) % 32
        amount = machine.concrete(by).astype(np.int64) & 31
        packed = machine.concrete(clamp).astype(np.int64)
        segment = (packed >> 8) & 31
        limit = (lane & segment) | (packed & 31 & ~segment)
        if mode == "up":
            other = lane - amount
            valid = other >= limit
        elif mode == "down":
            other = lane + amount
            valid = other <= limit
        else:
            other = lane ^ amount if mode == "bfly" else (lane & segment) | (amount & ~segment)
            valid = other <= limit
        other = np.arange(machine.threads) // 32 * 32 + np.where(valid, other, lane)
        made: Any = None
        if machine.names and machine.tainted(source):
            named: Word = machine.names_of(source, 32)
            made = named.take(other)
        machine.write(register, machine.bits(source, 32)[other], mask, made)
        if predicate is not None:
            machine.write(predicate, valid, mask)

    return step


@opcode("activemask")
def active_mask(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Return all ones: the machine runs whole warps."""
    machine.write(instruction.operands[0], np.full(machine.threads, 0xFFFFFFFF, np.uint32), mask)


@opcode("vote.sync")
def vote(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Combine a predicate over each warp; it must not depend on float data."""
    mode = instruction.parts[2]
    target, source, members = instruction.operands
    machine.whole_warps(mask)
    machine.full_warp(members)
    if machine.tainted(source):
        raise refuse(
            DataBranchError,
            instruction,
            expected="a vote that does not depend on float data",
            received=f"operand {getattr(source, 'name', source)}",
            remedy="use tl.where on values instead",
        )
    lanes = machine.bits(source, 1).reshape(-1, 32)
    if mode == "ballot" and instruction.parts[3] == "b32":
        made = (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
    elif mode in ("all", "any", "uni") and instruction.parts[3] == "pred":
        made = {"all": lanes.all(1), "any": lanes.any(1), "uni": lanes.all(1) | ~lanes.any(1)}[mode]
    else:
        raise unknown(instruction, "modifier of")
    machine.write(target, np.repeat(made, 32), mask)


INTEGER_REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@decoder("redux.sync")
def reduce_warp(instruction: Instruction) -> Step:
    """Decode a reduction over a warp: of integers, or the maximum or minimum of floats as a set."""
    operation, kind = instruction.parts[2], instruction.parts[-1]
    modifiers = set(instruction.parts[3:-1])
    target, source, members = instruction.operands
    is_float = kind == "f32"
    if is_float and (operation not in ("max", "min") or modifiers - {"NaN"}):
        raise unknown(instruction, "modifier of")
    if not is_float and (modifiers or operation not in INTEGER_REDUCTIONS or kind[1:] != "32"):
        raise unknown(instruction, "modifier of")
    name = SetNaming(f"{operation}{'.NaN' if 'NaN' in modifiers else ''}")

    def step(machine: State, mask: Array | None) -> None:
        machine.whole_warps(mask)
        machine.full_warp(members)
        if not is_float:
            lanes = machine.concrete(source).view(np.int32 if kind[0] == "s" else np.uint32)
            function = INTEGER_REDUCTIONS[operation]
            made = function.reduce(lanes.reshape(-1, 32), 1, dtype=lanes.dtype)
            machine.write(target, np.repeat(made, 32).view(np.uint32), mask)
            return
        lanes = machine.bits(source, 32).reshape(-1, 32)
        bits = extreme(operation, "f32", "NaN" in modifiers, False, *lanes.T)
        word = None
        if machine.names and machine.tainted(source):
            columns = list(machine.word(source).reshape(-1, 32).T)
            word = Word(np.repeat(machine.make(name, columns, bits), 32))
        machine.write(target, np.repeat(bits, 32), mask, word)

    return step
