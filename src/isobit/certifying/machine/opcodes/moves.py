"""Moves: whole registers, packing and unpacking of parts, addresses, constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine import packed
from isobit.certifying.machine.naming import Naming
from isobit.certifying.machine.opcodes.integers import COMPUTE as LOGIC
from isobit.certifying.machine.opcodes.integers import from_halves, half_list, join_predicates
from isobit.certifying.machine.opcodes.table import Step, decoder, opcode
from isobit.certifying.machine.predicates import negated
from isobit.certifying.machine.registers import SIGNED, UNSIGNED, constant_names, merge, normal
from isobit.certifying.machine.state import State
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import (
    WIDTHS,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Vector,
)
from isobit.certifying.running.refusals import unknown


@decoder("mov", register_only=True)
def move(instruction: Instruction) -> Step:
    """Decode a move, a packing {a, b} -> c, or an unpacking c -> {a, b}."""
    kind = instruction.parts[-1]
    if len(instruction.parts) != 2 or kind not in WIDTHS:
        raise unknown(instruction, "type of")
    width = WIDTHS[kind]
    target, source = instruction.operands
    if isinstance(target, Vector):
        return lambda machine, mask: unpack(machine, mask, target, source, width)
    if isinstance(source, Vector):
        return lambda machine, mask: pack(machine, mask, target, source, width)

    def step(machine: State, mask: Array | None) -> None:
        bits = machine.bits(source, width)
        made = None
        if isinstance(source, Register) and machine.names:
            made = machine.named[source.index]
        machine.write(target, bits, mask, made)

    return step


def unpack(machine: State, mask: Array | None, target: Vector, source: Operand, width: int) -> None:
    """Write the parts of one register to several."""
    part = width // len(target.items)
    values = np.ascontiguousarray(machine.bits(source, width)).view(UNSIGNED[part])
    values = values.reshape(machine.threads, len(target.items))
    halves = None
    if machine.names and machine.tainted(source):
        halves = half_list(machine, source, width)
    each = part // 16
    for i, register in enumerate(target.items):
        made = from_halves(halves[i * each : (i + 1) * each]) if halves else None
        machine.write(register, values[:, i].copy(), mask, made)


def pack(machine: State, mask: Array | None, target: Operand, source: Vector, width: int) -> None:
    """Write several registers to the parts of one."""
    part = width // len(source.items)
    values = np.stack([machine.bits(each, part) for each in source.items], -1)
    made = None
    if machine.names and any(map(machine.tainted, source.items)):
        made = from_halves([h for each in source.items for h in half_list(machine, each, part)])
    machine.write(target, values.reshape(-1).view(UNSIGNED[width]), mask, made)


@opcode("cvta")
def convert_address(machine: State, instruction: Instruction, mask: Array | None) -> None:
    """Copy an address: the machine's spaces have addresses of their own."""
    if "shared" in instruction.opcode and "to" not in instruction.parts:
        raise unknown(instruction, "generic address of shared memory by")
    target, source = instruction.operands
    machine.write(target, machine.bits(source, 64), mask, machine.named[source.index])  # type: ignore[union-attr]


# Comparisons, and selections by a predicate. One that depends on data has a name.

ORDERED: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
UNORDERED = {"ltu": "lt", "gtu": "gt", "leu": "le", "geu": "ge", "equ": "eq", "neu": "ne"}
FLOATS = ("f32", "f16", "bf16", "f64")


def float_values(bits: Array, kind: str) -> Array:
    """Return the values of bit patterns of a float type."""
    if kind in ("f16", "bf16"):
        return ar.widen(bits, kind)
    return bits.view(np.float64 if kind == "f64" else np.float32)


def comparison(instruction: Instruction, word: str, kind: str) -> Callable[[Array, Array], Array]:
    """Return a function that compares bit patterns."""
    if kind not in FLOATS:
        letter, width = kind[0], int(kind[1:])
        word = UNSIGNED_NAMES.get(word, word)
        if (
            word not in ORDERED
            or letter not in "sub"
            or (letter == "b" and word not in ("eq", "ne"))
        ):
            raise unknown(instruction, "comparison of")
        number: Any = SIGNED[width] if letter == "s" else UNSIGNED[width]
        return lambda x, y: ORDERED[word](x.view(number), y.view(number))
    ftz = "ftz" in instruction.parts

    def compare(x: Array, y: Array) -> Array:
        a, b = (float_values(each, kind) for each in (x, y))
        if ftz:
            a, b = ar.flush(a), ar.flush(b)
        unordered = np.isnan(a) | np.isnan(b)
        if word in ("num", "nan"):
            return unordered if word == "nan" else ~unordered
        if word in UNORDERED:
            return np.asarray(ORDERED[UNORDERED[word]](a, b) | unordered)
        return np.asarray(ORDERED[word](a, b) & ~unordered)

    if word not in ORDERED and word not in UNORDERED and word not in ("num", "nan"):
        raise unknown(instruction, "comparison of")
    return compare


@decoder("setp", register_only=True)
def set_predicate(instruction: Instruction) -> Step:
    """Decode a comparison; the predicate of a value that depends on data is named."""
    parts, kind = instruction.parts, instruction.parts[-1]
    rest = [part for part in parts[1:-1] if part != "ftz"]
    if not 1 <= len(rest) <= 2 or (len(rest) == 2 and rest[1] not in ("and", "or", "xor")):
        raise unknown(instruction, "modifier of")
    width = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}.get(kind) or int(kind[1:])
    compare = comparison(instruction, rest[0], kind)
    target, a, b, *more = instruction.operands
    alike = rest[0] in ("eq", "ne") and kind not in FLOATS
    ftz = ".ftz" if "ftz" in parts else ""
    name = Naming(f"setp.{rest[0]}{ftz}.{'b' + str(width) if alike else kind}", alike)

    def step(machine: State, mask: Array | None) -> None:
        with np.errstate(all="ignore"):
            bits = compare(machine.bits(a, width), machine.bits(b, width))
        made = machine.opaque(name, [(a, width), (b, width)], bits, 1)
        if made is not None and kind not in FLOATS:
            made = normal(1, packed.unpack(machine, made, compare, (a, b), width))
        results = [(target, bits, made)]
        if isinstance(target, Pair):
            other = None if made is None else negated(made)
            results = [(target.first, bits, made), (target.second, ~bits, other)]
        for register, value, named in results:
            if more:
                also = machine.bits(more[0], 1)
                if machine.names and (named is not None or machine.tainted(more[0])):
                    first = constant_names(value, 1) if named is None else named
                    second = machine.names_of(more[0], 1)
                    named = normal(1, join_predicates(rest[1], first, second))
                value = LOGIC[rest[1]](value, also)
            if not isinstance(register, Sink):
                machine.write(register, value, mask, named)

    return step


@decoder("selp", register_only=True)
def select(instruction: Instruction) -> Step:
    """Decode a selection; by a predicate that depends on data it is named as a select."""
    if len(instruction.parts) != 2 or instruction.parts[1][-2:] not in ("16", "32", "64"):
        raise unknown(instruction, "type of")
    width = int(instruction.parts[1][-2:])
    target, a, b, predicate = instruction.operands

    def step(machine: State, mask: Array | None) -> None:
        chosen = machine.bits(predicate, 1)
        bits = np.where(chosen, machine.bits(a, width), machine.bits(b, width))
        made = None
        if machine.names and any(map(machine.tainted, (a, b, predicate))):
            guard = machine.names_of(predicate, 1) if machine.tainted(predicate) else None
            x, y = machine.names_of(a, width), machine.names_of(b, width)
            made = normal(width, merge(width, chosen, guard, x, y))
            if guard is not None and made is not None and instruction.parts[1][0] in "sub":
                packed.pack(machine, width, made, guard, a, b)
            if machine.recorded is not None and made is not None and width == 32:
                known = nm.constant_predicate(chosen) if guard is None else guard
                operands = [known, x.value, y.value]
                if guard is not None:
                    machine.recorded.add("select", made.value, operands, instruction)
        machine.write(target, bits, mask, made)

    return step
