"""Float arithmetic: add, sub, mul, fma, div, sqrt, max, min, neg, abs and the approximations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine.naming import Naming, SetNaming
from isobit.certifying.machine.opcodes.integers import integer_arithmetic
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import Word
from isobit.certifying.machine.state import State
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.maxima import SETS
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Immediate, Instruction, Operand
from isobit.certifying.running.refusals import unknown

TYPES = ("f32", "f32x2", "f16", "bf16", "f16x2", "bf16x2", "f64")

# stem -> the operation on numpy arrays of one float type
COMPUTE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
}
APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "div": np.divide,
}


def float_type(instruction: Instruction) -> str | None:
    """Return the float type of an instruction, or None if it works on integers."""
    return instruction.parts[-1] if instruction.parts[-1] in TYPES else None


@decoder("add", "sub", "mul", "fma", "div", "sqrt", "mad", register_only=True)
def arithmetic(instruction: Instruction) -> Step:
    """Decode float arithmetic that rounds once; integers go to `integer_arithmetic`."""
    parts, stem = set(instruction.parts[1:]), instruction.parts[0]
    kind = float_type(instruction)
    if kind is None:
        return integer_arithmetic(instruction)
    if "approx" in parts or "full" in parts:
        return approximation(instruction)
    if len(instruction.parts) > 2 and instruction.parts[-2] == "f32" and kind in ("f16", "bf16"):
        return mixed(instruction, kind)
    if parts - {"rn", "ftz", kind} or stem == "mad":
        raise unknown(instruction, "modifier of")
    if "rn" not in parts and stem in ("add", "sub", "mul") and kind in ("f32", "f32x2"):
        return contractable(instruction, kind)
    return rounded(instruction, stem, kind, "ftz" in parts)


def contractable(instruction: Instruction, kind: str) -> Step:
    """Decode add, sub or mul without a rounding: ptxas may fuse it, which is a fact to record."""
    inner = rounded(instruction, instruction.parts[0], kind, "ftz" in instruction.parts)

    def step(machine: State, mask: Array | None) -> None:
        machine.fact("float arithmetic without .rn, which ptxas may fuse into fma")
        inner(machine, mask)

    return step


def rounded(instruction: Instruction, stem: str, kind: str, ftz: bool) -> Step:
    """Return what runs a correctly rounded operation."""
    target, *sources = instruction.operands
    operation = (
        stem + (".ftz" if ftz else "") + ("" if kind in ("f32", "f32x2") else f".{kind[:4]}")
    )
    if kind.startswith(("f16", "bf16")):
        operation = f"{stem}{'.ftz' if ftz else ''}.{kind.removesuffix('x2')}"
    compute = computation(stem, kind.removesuffix("x2"), ftz)

    name = Naming(operation)

    def step(machine: State, mask: Array | None) -> None:
        if ftz:
            machine.fact("flushes subnormals to zero (.ftz)")
        apply(machine, mask, target, sources, kind, compute, name)

    return step


def computation(stem: str, kind: str, ftz: bool) -> Callable[..., Array]:
    """Return a function from bit patterns to bit patterns of one float type."""

    def wide(*patterns: Array) -> Array:  # fp32
        values = [ar.flush(ar.floats(p)) if ftz else ar.floats(p) for p in patterns]
        made = ar.fma(*values) if stem == "fma" else COMPUTE[stem](*values)
        return ar.patterns(ar.flush(made) if ftz else made)

    def double(*patterns: Array) -> Array:
        if stem == "fma":
            return fma64(*patterns)
        made = COMPUTE[stem](*[p.view(np.float64) for p in patterns])
        bits: Array = made.view(np.uint64)
        return np.where(np.isnan(made), np.uint64(0x7FFFFFFFFFFFFFFF), bits)

    def narrow(*patterns: Array) -> Array:  # fp16 and bf16: exact in fp64, then rounded once
        values = [ar.widen(p, kind).astype(np.float64) for p in patterns]
        if stem == "fma":
            values = [ar.odd_sum(values[0] * values[1], values[2])]
        made = values[0] if stem == "fma" else COMPUTE[stem](*values)
        if kind == "f16":
            return ar.round_f16(made)
        return ar.round_bf16(ar.narrow_odd(made).view(np.uint32))

    return {"f32": wide, "f64": double}.get(kind, narrow)


def fma64(a: Array, b: Array, c: Array) -> Array:
    """Return the fp64 fused multiply-add by exact fractions; slow, and rare in kernels."""
    import math
    from fractions import Fraction

    out = np.empty(a.size, np.float64)
    for i, (x, y, z) in enumerate(zip(*(v.view(np.float64) for v in (a, b, c)), strict=True)):
        if not all(map(math.isfinite, (x, y, z))) or x * y == 0:
            out[i] = x * y + z
        else:
            total = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
            try:
                out[i] = float(total)
            except OverflowError:
                out[i] = math.copysign(math.inf, total)
    return np.where(np.isnan(out), np.uint64(0x7FFFFFFFFFFFFFFF), out.view(np.uint64))


def apply(
    machine: State,
    mask: Array | None,
    target: Operand,
    sources: list[Operand],
    kind: str,
    compute: Callable[..., Array],
    name: Naming,
) -> None:
    """Compute bits and names of an operation on registers of a float type."""
    with np.errstate(all="ignore"):
        if kind == "f32":
            inputs = [machine.bits(each, 32) for each in sources]
            bits = compute(*inputs)
            made: Any = None
            if has_names(machine, name, sources):
                made = Word(machine.make(name, [machine.word(each) for each in sources], bits))
            machine.write(target, bits, mask, made)
        elif kind in ("f16", "bf16"):
            inputs = [machine.bits(each, 16) for each in sources]
            bits = compute(*inputs)
            made = None
            if has_names(machine, name, sources):
                operands = [nm.value16(machine.half(each)) for each in sources]
                made = name.halves(machine.make(name, operands, None), operands, bits)
            machine.write(target, bits, mask, made)
        elif kind == "f64":
            bits = compute(*[machine.bits(each, 64) for each in sources])
            made = machine.opaque(name, [(each, 64) for each in sources], bits, 64)
            machine.write(target, bits, mask, made)
        else:
            vector(machine, mask, target, sources, kind, compute, name)


def has_names(machine: State, name: Naming, sources: list[Operand]) -> bool:
    """Tell whether the result of an operation is named: one of constants has only bits."""
    return machine.names and (not name.folds or any(map(machine.tainted, sources)))


def vector(
    machine: State,
    mask: Array | None,
    target: Operand,
    sources: list[Operand],
    kind: str,
    compute: Callable[..., Array],
    name: Naming,
) -> None:
    """Compute a packed pair: f32x2 in 64 bits, f16x2 and bf16x2 in 32 bits."""
    width, part = (64, np.uint32) if kind == "f32x2" else (32, np.uint16)
    inputs = [np.ascontiguousarray(machine.bits(each, width)).view(part) for each in sources]
    bits = compute(*inputs)
    made: Any = None
    if has_names(machine, name, sources):
        both = [machine.names_of(each, width) for each in sources]
        if kind == "f32x2":
            lanes = []
            for i in (0, 1):
                operands = [each[i].value for each in both]
                lane = machine.make(name, operands, bits[i::2])
                lanes.append(Word(SETS.unchanged(name.operation, operands, lane)))
            made = tuple(lanes)
        else:
            parts = []
            for i in (0, 1):
                operands = [nm.value16(each.halves[i]) for each in both]
                parts.append(name.halves(machine.make(name, operands, None), operands, bits[i::2]))
            low, high = parts
            made = Word(low=low, high=high)
    machine.write(target, bits.view(np.uint64 if width == 64 else np.uint32), mask, made)


def mixed(instruction: Instruction, kind: str) -> Step:
    """Decode add, sub or fma of fp32 whose first operands are fp16 or bf16 (sm_100)."""
    stem = instruction.parts[0]
    if set(instruction.parts[1:]) - {"rn", "f32", kind} or stem not in ("add", "sub", "fma"):
        raise unknown(instruction, "modifier of")
    target, *sources = instruction.operands
    compute, name = computation(stem, "f32", False), Naming(stem)

    def step(machine: State, mask: Array | None) -> None:
        bits = [ar.widen(machine.bits(each, 16), kind).view(np.uint32) for each in sources[:-1]]
        bits.append(machine.bits(sources[-1], 32))
        made = None
        with np.errstate(all="ignore"):
            result = compute(*bits)
        if has_names(machine, name, sources):
            operands = [machine.widened(each, kind) for each in sources[:-1]]
            operands.append(machine.word(sources[-1]))
            made = Word(machine.make(name, operands, result))
        machine.write(target, result, mask, made)

    return step


@decoder(*(set(APPROXIMATE) - set(COMPUTE)), register_only=True)
def approximation(instruction: Instruction) -> Step:
    """Decode a function that the hardware approximates: its bits here are numpy's, not its own."""
    kind, stem = float_type(instruction), instruction.parts[0]
    extra = set(instruction.parts[1:]) - {"approx", "full", "ftz", kind}
    exact = stem == "rcp" and "rn" in extra and kind == "f32"
    if kind not in ("f32", "f16", "bf16", "f16x2", "bf16x2") or (
        extra - {"rn"} or bool(extra) != exact
    ):
        raise unknown(instruction, "modifier of")
    target, *sources = instruction.operands
    if exact:  # correctly rounded
        compute = computation("div", "f32", "ftz" in instruction.parts)
        one = Immediate(0x3F800000, "f32")
        name = Naming("div.ftz" if "ftz" in instruction.parts else "div")
        return lambda machine, mask: apply(
            machine, mask, target, [one, *sources], kind, compute, name
        )
    single, function = kind.removesuffix("x2"), APPROXIMATE[stem]
    ftz = "ftz" in instruction.parts

    def approximate(*patterns: Array) -> Array:
        if single != "f32":
            made = function(*[ar.widen(p, single) for p in patterns])
            return ar.round_f16(made) if single == "f16" else ar.round_bf16(ar.patterns(made))
        values = [ar.flush(ar.floats(p)) if ftz else ar.floats(p) for p in patterns]
        made = function(*values)
        return ar.patterns(ar.flush(made) if ftz else made)

    operation = instruction.opcode.replace("f16x2", "f16")  # a pair is two of the single

    name = Naming(operation, commutative=False, folds=False)

    def step(machine: State, mask: Array | None) -> None:
        machine.approximate.add(instruction.opcode)
        apply(machine, mask, target, sources, kind, approximate, name)

    return step


# Maximum and minimum, sign and absolute value, of floats and integers.


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
