"""Loads and stores of registers: parameters, global and shared memory, matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from isobit.certifying.machine.opcodes.integers import from_halves, half_list
from isobit.certifying.machine.opcodes.table import Step, decoder, opcode
from isobit.certifying.machine.registers import UNSIGNED, Word
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names, byte_of, half_of_bytes
from isobit.certifying.ptx.program import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    Vector,
)
from isobit.certifying.running.refusals import FloatAtomicError, OpcodeError, refuse, unknown

# Modifiers of where data is cached or how soon it is seen; they change no bits.
HINTS = {"ca", "cg", "cs", "cv", "wb", "wt", "nc", "relaxed", "weak", "volatile", "gpu", "cta"}
HINTS |= {"L1::evict_last", "L1::evict_first", "L1::no_allocate", "L2::cache_hint", "sys"}
HINTS |= {"L1::evict_normal", "L1::evict_unchanged", "acquire", "release"}
SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "const": "global"}


def transfer_type(instruction: Instruction) -> tuple[str, int, int]:
    """Return the space, the bits of an element and the elements of a load or store."""
    parts, kind = instruction.parts[1:-1], instruction.parts[-1]
    spaces = [SPACES[part] for part in parts if part in SPACES]
    vectors = [int(part[1:]) for part in parts if part in ("v2", "v4", "v8")]
    rest = [p for p in parts if p not in SPACES and p not in HINTS and p not in ("v2", "v4", "v8")]
    if len(spaces) != 1 or len(vectors) > 1 or rest or kind not in WIDTHS or WIDTHS[kind] < 8:
        raise unknown(instruction, "space, type or modifier of")
    return spaces[0], WIDTHS[kind], vectors[0] if vectors else 1


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return the registers of a vector, or the one register."""
    return operand.items if isinstance(operand, Vector) else (operand,)


@decoder("ld.param")
def load_parameter(instruction: Instruction) -> Step:
    """Decode a load of a parameter: concrete in all threads."""
    target, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or source.offset:
        raise unknown(instruction, "address of")
    name, width = source.base.name, WIDTHS.get(instruction.parts[-1], 0)
    if len(instruction.parts) != 3 or width < 8 or not isinstance(target, Register):
        raise unknown(instruction, "type of")

    def step(machine: State, mask: Array | None) -> None:
        if name not in machine.parameters:
            raise unknown(instruction, f"parameter {name} of")
        value = machine.parameters[name] & ((1 << width) - 1)
        machine.write(target, np.full(machine.threads, value, UNSIGNED[target.width]), mask)

    return step


@decoder("ld")
def load(instruction: Instruction) -> Step:
    """Decode a load from global or shared memory."""
    space, width, count = transfer_type(instruction)
    targets, source = items_of(instruction.operands[0]), instruction.operands[1]
    if len(targets) != count:
        raise unknown(instruction, "number of registers of")
    signed = instruction.parts[-1][0] == "s"
    if width == 8:
        if count != 1:
            raise unknown(instruction, "vector of bytes of")
        return lambda machine, mask: load_byte(machine, mask, space, targets[0], source, signed)

    def step(machine: State, mask: Array | None) -> None:
        halves, made = machine.load(space, machine.address(source), width // 8 * count, mask)
        each = width // 16
        for i, target in enumerate(targets):
            part = slice(i * each, (i + 1) * each)
            bits = np.ascontiguousarray(halves[:, part]).view(UNSIGNED[width])[:, 0]
            columns = (
                [made[:, j] for j in range(i * each, (i + 1) * each)] if made is not None else []
            )
            if isinstance(target, Register) and target.width != width:
                bits, columns = extend(machine, target, bits, columns, width, signed)
            machine.write(target, bits, mask, from_halves(columns) if columns else None)

    return step


def extend(
    machine: State, target: Register, bits: Array, columns: list[Names], width: int, signed: bool
) -> tuple[Array, list[Names]]:
    """Return a loaded value that is widened to its register by zeros."""
    if signed or target.width < width:
        raise unknown(machine.current, "register width of")
    zeros = [np.full(machine.threads, nm.FIXED)] * ((target.width - width) // 16)
    return bits.astype(UNSIGNED[target.width]), (columns + zeros if columns else [])


def load_byte(
    machine: State, mask: Array | None, space: str, target: Operand, source: Operand, signed: bool
) -> None:
    """Load one byte and extend it to the register."""
    addresses = machine.address(source)
    halves, made = machine.load(space, addresses, 1, mask)
    odd = (addresses & 1).astype(bool)
    byte = np.where(odd, halves[:, 0] >> np.uint16(8), halves[:, 0] & np.uint16(0xFF))
    width = getattr(target, "width", 16)
    if signed:
        bits = byte.astype(np.uint8).view(np.int8).astype(f"i{width // 8}").view(UNSIGNED[width])
    else:
        bits = byte.astype(UNSIGNED[width])
    named: Any = None
    if made is not None:
        name = np.where(odd, byte_of(made[:, 0], 1), byte_of(made[:, 0], 0))
        zeros = np.full(machine.threads, nm.FIXED)
        if signed:
            part = nm.half16(nm.make("sign of byte", name))
            known = nm.is_constant(name)
            columns = [
                np.where(
                    known,
                    nm.fixed_half((bits >> (16 * i)) & 0xFFFF),
                    nm.VALUE | nm.mix(part, np.uint64(i)),
                )
                for i in range(width // 16)
            ]
        else:
            low = half_of_bytes(name, nm.constant16(np.zeros(machine.threads)))
            columns = [low, zeros, zeros, zeros][: width // 16]
        named = from_halves(columns)
    machine.write(target, bits, mask, named)


@decoder("st")
def store(instruction: Instruction) -> Step:
    """Decode a store to global or shared memory."""
    space, width, count = transfer_type(instruction)
    target, sources = instruction.operands[0], items_of(instruction.operands[1])
    if len(sources) != count:
        raise unknown(instruction, "number of registers of")
    if width == 8:
        return lambda machine, mask: store_bytes(machine, mask, space, target, sources)

    def step(machine: State, mask: Array | None) -> None:
        values = [np.ascontiguousarray(machine.bits(each, width)) for each in sources]
        halves = np.stack(values, 1).view(np.uint16)
        made = None
        if machine.names and any(map(machine.tainted, sources)):
            columns: list[Names] = []
            for each in sources:
                wide = each.width if isinstance(each, Register) else width
                columns += half_list(machine, each, wide)[: width // 16]
            made = np.stack(columns, 1)
        machine.store(space, machine.address(target), halves, made, mask)

    return step


def store_bytes(
    machine: State, mask: Array | None, space: str, target: Operand, sources: tuple[Operand, ...]
) -> None:
    """Store bytes: the half around each gets the name of its two bytes."""
    addresses = machine.address(target)
    for i, source in enumerate(sources):
        bits = machine.bits(source, 8)
        name = None
        if machine.names:
            name = machine.one_name(source, 8)
        machine.store_byte(space, addresses + i, bits, name, mask)


def is_transposed(instruction: Instruction) -> bool:
    """Tell whether ldmatrix or stmatrix exchanges rows and columns; refuse a form that is not known."""
    parts = set(instruction.parts[1:])
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if parts - known or not parts >= {"sync", "aligned", "m8n8", "b16"}:
        raise unknown(instruction, "modifier of")
    return "trans" in parts


@decoder("ldmatrix")
def load_matrix(instruction: Instruction) -> Step:
    """Decode ldmatrix: 8x8 matrices of 16 bits, spread over a warp."""
    targets, source = items_of(instruction.operands[0]), instruction.operands[1]
    transposed = is_transposed(instruction)

    def step(machine: State, mask: Array | None) -> None:
        machine.whole_warps(mask)
        rows = machine.address(source).reshape(-1, 32)
        for i, target in enumerate(targets):
            matrices, made = machine.load_rows(rows[:, 8 * i : 8 * i + 8], mask)
            if transposed:
                matrices = matrices.transpose(0, 2, 1)
            bits = np.ascontiguousarray(matrices).reshape(-1).view(np.uint32)
            named = None
            if made is not None:
                grid = (made.transpose(0, 2, 1) if transposed else made).reshape(-1, 2)
                named = Word(low=grid[:, 0].copy(), high=grid[:, 1].copy())
            machine.write(target, bits, mask, named)

    return step


@decoder("stmatrix")
def store_matrix(instruction: Instruction) -> Step:
    """Decode stmatrix: the inverse of ldmatrix."""
    target, sources = instruction.operands[0], items_of(instruction.operands[1])
    transposed = is_transposed(instruction)

    def step(machine: State, mask: Array | None) -> None:
        machine.whole_warps(mask)
        rows = machine.address(target).reshape(-1, 32)
        for i, source in enumerate(sources):
            data = np.ascontiguousarray(machine.bits(source, 32)).view(np.uint16).reshape(-1, 8, 8)
            made = None
            if machine.names:
                made = np.stack(machine.halves(source), -1).reshape(-1, 8, 8)
                made = made.transpose(0, 2, 1) if transposed else made
            data = data.transpose(0, 2, 1) if transposed else data
            machine.store_rows(rows[:, 8 * i : 8 * i + 8], data, made, mask)

    return step


# Asynchronous copies from global to shared memory (cp.async), fences and prefetches.


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


# Atomic operations: of floats their order is not defined, so they are refused by name.

FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"}


@decoder("atom", "red", "cp.reduce")
def atomic(instruction: Instruction) -> Step:
    """Refuse an atomic operation."""
    if FLOATS & set(instruction.parts):
        raise refuse(
            FloatAtomicError,
            instruction,
            expected="float additions in an order that the code defines",
            received=f"a float atomic, {instruction.opcode}, whose order differs between runs",
            remedy="store the partial results and add them in a second kernel, or give each output "
            "to one program (no split along the summed axis)",
        )
    raise refuse(
        OpcodeError,
        instruction,
        expected="a kernel whose programs do not depend on each other",
        received=f"an atomic on integers, {instruction.opcode}: its result depends on which "
        "program comes first",
        remedy="use two launches instead of a counter or a lock between programs",
    )
