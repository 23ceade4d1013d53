"""Maximum and minimum, sign and absolute value, of floats and integers."""

from __future__ import annotations

import numpy as np

from isobit.certifying.machine.naming import Naming, SetNaming
from isobit.certifying.machine.opcodes.floats import apply, float_type
from isobit.certifying.machine.opcodes.integers import integer_arithmetic
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import unknown


def extreme(stem: str, kind: str, nan: bool, ftz: bool, *patterns: Array) -> Array:
    """Return the maximum or minimum of bit patterns: +0 is above -0 (PTX ISA, max)."""
    narrow = kind in ("f16", "bf16")
    values = [ar.widen(p, kind) if narrow else ar.floats(p) for p in patterns]
    if ftz:
        values = [ar.flush(each) for each in values]
    out = values[0]
    for other in values[1:]:
        equal = (out == other) & (out == 0)
        sign = (
            np.signbit(out) & np.signbit(other)
            if stem == "max"
            else np.signbit(out) | np.signbit(other)
        )
        zero = np.where(sign, np.float32(-0.0), np.float32(0.0))
        if nan:
            made = np.maximum(out, other) if stem == "max" else np.minimum(out, other)
        else:
            made = np.fmax(out, other) if stem == "max" else np.fmin(out, other)
        out = np.where(equal, zero, made)
    bits = ar.patterns(out)
    if kind == "bf16":
        return ar.round_bf16(bits)
    return ar.round_f16(out) if kind == "f16" else bits


@decoder("max", "min", register_only=True)
def maximum(instruction: Instruction) -> Step:
    """Decode max and min; of floats they are named as sets."""
    stem, kind = instruction.parts[0], float_type(instruction)
    if instruction.parts[1:] in (("s16x2",), ("u16x2",)):
        return packed_integers(instruction)
    if kind is None:
        return integer_arithmetic(instruction)
    modifiers = set(instruction.parts[1:-1])
    if modifiers - {"NaN", "ftz"} or kind in ("f64", "f32x2"):
        raise unknown(instruction, "modifier of")
    nan, ftz, single = "NaN" in modifiers, "ftz" in modifiers, kind.removesuffix("x2")
    operation = f"{stem}{'.NaN' if nan else ''}{'.ftz' if ftz else ''}"
    name = SetNaming(operation if single == "f32" else f"{operation}.{single}")
    target, *sources = instruction.operands

    def step(machine: State, mask: Array | None) -> None:
        def compute(*patterns: Array) -> Array:
            return extreme(stem, single, nan, ftz, *patterns)

        apply(machine, mask, target, sources, kind, compute, name)

    return step


def packed_integers(instruction: Instruction) -> Step:
    """Return what runs max and min of two 16-bit integers side by side; a half is named as one of 16 bits."""
    stem, kind = instruction.parts[0], instruction.parts[1].removesuffix("x2")
    number = np.int16 if kind == "s16" else np.uint16
    compute, name = np.maximum if stem == "max" else np.minimum, Naming(f"{stem}.{kind}")
    target, *sources = instruction.operands

    def step(machine: State, mask: Array | None) -> None:
        parts = [np.ascontiguousarray(machine.bits(each, 32)).view(number) for each in sources]
        bits = compute(*parts).view(np.uint16)
        made = None
        if machine.names and any(map(machine.tainted, sources)):
            both = [machine.names_of(each, 32).halves for each in sources]
            halves = []
            for i in (0, 1):
                operands = [nm.value16(each[i]) for each in both]
                halves.append(name.halves(machine.make(name, operands, None), operands, bits[i::2]))
            made = Word(low=halves[0], high=halves[1])
        machine.write(target, bits.view(np.uint32), mask, made)

    return step


@decoder("neg", "abs", "copysign", register_only=True)
def sign(instruction: Instruction) -> Step:
    """Decode neg, abs and copysign."""
    stem, kind = instruction.parts[0], float_type(instruction)
    if kind is None:
        return integer_arithmetic(instruction)
    modifiers = set(instruction.parts[1:-1])
    if modifiers - {"ftz"} or kind in ("f64", "f32x2"):
        raise unknown(instruction, "modifier of")
    single, ftz = kind.removesuffix("x2"), "ftz" in modifiers
    top = np.uint32(1 << 31) if single == "f32" else np.uint16(1 << 15)

    def compute(*patterns: Array) -> Array:
        value = patterns[-1]
        if ftz:
            value = ar.flush(ar.floats(value)).view(np.uint32)
        if stem == "copysign":
            return np.asarray((patterns[1] & ~top) | (patterns[0] & top))
        made = value ^ top if stem == "neg" else value & ~top
        return ar.canonical(made, single)

    name = Naming(f"{stem}{'.ftz' if ftz else ''}{'' if single == 'f32' else '.' + single}")
    target, *sources = instruction.operands
    return lambda machine, mask: apply(machine, mask, target, sources, kind, compute, name)
