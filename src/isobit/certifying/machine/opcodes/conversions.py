"""Conversions between types."""

from __future__ import annotations

from typing import Any

import numpy as np

from isobit.certifying.machine.naming import Naming
from isobit.certifying.machine.opcodes.integers import from_halves, half_list
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import SIGNED, UNSIGNED, Word
from isobit.certifying.machine.state import State
from isobit.certifying.names import arithmetic as ar
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import WIDTHS, Instruction
from isobit.certifying.running.refusals import unknown

INTEGRAL_FP32 = ("f32", "f32")  # tl.floor and the like
FLOATS = ("f16", "bf16", "f32", "f64")


@decoder("cvt", register_only=True)
def convert(instruction: Instruction) -> Step:
    """Decode a conversion by its two types."""
    if len(instruction.parts) < 3:
        raise unknown(instruction, "types of")
    to, source = instruction.parts[-2:]
    pair = 3 if to in ("bf16x2", "f16x2") and source == "f32" else 2
    if len(instruction.operands) != pair:  # such as two fp32 values to a pair of fp8
        raise unknown(instruction, "number of operands of")
    modifiers = set(instruction.parts[1:-2])
    if to in ("bf16x2", "f16x2") and source == "f32" and modifiers == {"rn"}:
        return narrow_pair(instruction, to.removesuffix("x2"))
    if to in ("bf16", "f16") and source == "f32" and modifiers == {"rn"}:
        return narrow(instruction, to)
    if to == "f32" and source in ("bf16", "f16") and not modifiers:
        return widen(instruction, source)
    if instruction.opcode == "cvt.rna.tf32.f32":
        return to_tf32(instruction)
    if to in FLOATS or source in FLOATS:
        return numbers(instruction, to, source, modifiers)
    if to in WIDTHS and source in WIDTHS and not modifiers:
        return integers(instruction, to, source)
    raise unknown(instruction, "types of")


def round16(bits: Array, kind: str) -> Array:
    """Return fp32 patterns rounded to 16 bits."""
    with np.errstate(all="ignore"):
        return ar.round_bf16(bits) if kind == "bf16" else ar.round_f16(ar.floats(bits))


def narrow_pair(instruction: Instruction, kind: str) -> Step:
    """Decode a rounding of two fp32 values to a pair; the first operand is the upper half."""
    target, high, low = instruction.operands
    name = Naming(f"round {kind}")

    def step(machine: State, mask: Array | None) -> None:
        parts = [round16(machine.bits(each, 32), kind) for each in (low, high)]
        bits = parts[0].astype(np.uint32) | (parts[1].astype(np.uint32) << np.uint32(16))
        made = None
        if machine.names and (machine.tainted(low) or machine.tainted(high)):
            halves = []
            for each, part in zip((low, high), parts, strict=True):
                operand = [machine.word(each)]
                halves.append(name.halves(machine.make(name, operand, None), operand, part))
            made = Word(low=halves[0], high=halves[1])
        machine.write(target, bits, mask, made)

    return step


def narrow(instruction: Instruction, kind: str) -> Step:
    """Decode a rounding of fp32 to 16 bits."""
    target, source = instruction.operands
    name = Naming(f"round {kind}")

    def step(machine: State, mask: Array | None) -> None:
        bits = round16(machine.bits(source, 32), kind)
        made = None
        if machine.names and machine.tainted(source):
            operand = [machine.word(source)]
            made = name.halves(machine.make(name, operand, None), operand, bits)
        machine.write(target, bits, mask, made)

    return step


def widen(instruction: Instruction, kind: str) -> Step:
    """Decode the exact fp32 value of a 16-bit one; a bf16 is the upper half of its fp32."""
    target, source = instruction.operands

    def step(machine: State, mask: Array | None) -> None:
        with np.errstate(all="ignore"):
            bits = ar.widen(machine.bits(source, 16), kind).view(np.uint32)
        if kind == "f16":
            bits = ar.canonical(bits)
        made = None
        if machine.names and machine.tainted(source):
            if kind == "bf16":
                half = machine.half(source)
                made = Word(low=np.full_like(half, nm.FIXED), high=half)
                if machine.recorded is not None:
                    machine.widened(source, kind)
            else:
                made = Word(machine.widened(source, kind))
        machine.write(target, bits, mask, made)

    return step


def to_tf32(instruction: Instruction) -> Step:
    """Decode a rounding to tf32: ten fraction bits, ties away from zero, the other bits zero."""
    target, source = instruction.operands
    name = Naming(instruction.opcode)

    def step(machine: State, mask: Array | None) -> None:
        value = machine.bits(source, 32)
        near = (value + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        nan = (value & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits = np.where(nan, np.uint32(0x7FFFFFFF), near)
        machine.write(target, bits, mask, machine.opaque(name, [(source, 32)], bits, 32))

    return step


def integers(instruction: Instruction, to: str, source: str) -> Step:
    """Decode a conversion between integers: an extension or the lower part."""
    target, operand = instruction.operands
    wide, narrow_width = WIDTHS[to], WIDTHS[source]
    number: Any = SIGNED[narrow_width] if source[0] == "s" else UNSIGNED[narrow_width]
    out = getattr(target, "width", wide)
    name = Naming(f"cvt.{to}.{source}" + (f" to {out}" if out != wide else ""))
    # a part of what is read, with zeros above: not where a sign is extended, also beyond the type
    keeps_halves = min(wide, narrow_width) >= 16 and not (
        (source[0] == "s" and wide > narrow_width) or (to[0] == "s" and out > wide)
    )

    def step(machine: State, mask: Array | None) -> None:
        value = machine.bits(operand, max(narrow_width, 8)).view(number)
        kind: Any = SIGNED[out] if to[0] == "s" else UNSIGNED[out]
        cut: Any = SIGNED[wide] if to[0] == "s" else UNSIGNED[wide]
        bits = value.astype(cut).astype(kind).view(UNSIGNED[out])
        made = None
        if machine.names and machine.tainted(operand):
            if keeps_halves:
                zeros = np.full(machine.threads, nm.FIXED)
                halves = half_list(machine, operand, narrow_width)[: wide // 16]
                made = from_halves((halves + [zeros] * 4)[: out // 16])
            else:
                made = machine.opaque(name, [(operand, narrow_width)], bits, out)
        machine.write(target, bits, mask, made)

    return step


def numbers(instruction: Instruction, to: str, source: str, modifiers: set[str]) -> Step:
    """Decode a conversion between integers and floats, or of a float to integral values."""
    target, operand = instruction.operands
    rounding = modifiers & {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"}
    flushes = "ftz" in modifiers
    if (
        len(rounding) > 1
        or modifiers - rounding - {"ftz"}
        or (flushes and (to, source) != INTEGRAL_FP32)
    ):
        raise unknown(instruction, "modifier of")
    mode = min(rounding, default="")
    name = Naming(instruction.opcode)
    width, from_width = WIDTHS[to], WIDTHS[source]
    out = getattr(target, "width", width)
    convert_bits = number_conversion(instruction, to, source, mode)

    def compute(bits: Array) -> Array:
        return convert_bits(ar.flush(ar.floats(bits)).view(np.uint32) if flushes else bits)  # type: ignore[no-any-return]

    def step(machine: State, mask: Array | None) -> None:
        with np.errstate(all="ignore"):
            bits = compute(machine.bits(operand, from_width))
        if to[0] == "s":
            bits = bits.view(SIGNED[width]).astype(SIGNED[out])
        bits = bits.astype(UNSIGNED[out])
        machine.write(target, bits, mask, machine.opaque(name, [(operand, from_width)], bits, out))

    return step


def number_conversion(instruction: Instruction, to: str, source: str, mode: str) -> Any:
    """Return a function of bit patterns for a conversion that has a float on one side."""
    if source in FLOATS:
        if to in FLOATS:
            if (to, source, mode) in (
                ("f64", "f32", ""),
                ("f32", "f64", "rn"),
            ) or ((to, source) == INTEGRAL_FP32 and mode in INTEGRAL):
                return lambda bits: float_to_float(bits, to, source, mode)
            raise unknown(instruction, "types of")
        if mode not in INTEGRAL:
            raise unknown(instruction, "modifier of")
        return lambda bits: float_to_integer(bits, to, source, mode)
    if mode != "rn" or (to == "f64" and WIDTHS[source] == 64):
        raise unknown(instruction, "modifier of")
    number: Any = SIGNED[WIDTHS[source]] if source[0] == "s" else UNSIGNED[WIDTHS[source]]
    if to in ("f32", "f64"):
        kind: Any = np.float32 if to == "f32" else np.float64
        return lambda bits: bits.view(number).astype(kind).view(UNSIGNED[WIDTHS[to]])
    if WIDTHS[source] > 32:
        raise unknown(instruction, "types of")
    return lambda bits: round_integer(bits.view(number), to)


def round_integer(values: Array, kind: str) -> Array:
    """Return 16-bit floats of integers of up to 32 bits, which fp64 holds exactly."""
    wide = values.astype(np.float64)
    if kind == "f16":
        return ar.round_f16(wide)
    return ar.round_bf16(ar.narrow_odd(wide).view(np.uint32))


INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_integer(bits: Array, to: str, source: str, mode: str) -> Array:
    """Return integers of floats, clamped to the type; NaN is 0 (PTX ISA, cvt)."""
    values = (
        ar.widen(bits, source)
        if source in ("f16", "bf16")
        else bits.view(f"f{WIDTHS[source] // 8}")
    )
    whole = INTEGRAL[mode](values.astype(np.float64))
    kind: Any = SIGNED[WIDTHS[to]] if to[0] == "s" else UNSIGNED[WIDTHS[to]]
    limits = np.iinfo(kind)
    inside = np.where((whole >= limits.min) & (whole <= float(limits.max)), whole, 0)
    made = inside.astype(kind)
    made = np.where(whole >= float(limits.max), kind(limits.max), made)
    made = np.where(whole < limits.min, kind(limits.min), made)
    return np.where(np.isnan(whole), kind(0), made).view(UNSIGNED[WIDTHS[to]])


def float_to_float(bits: Array, to: str, source: str, mode: str) -> Array:
    """Return fp64 of fp32, fp32 of fp64, or fp32 rounded to an integral value."""
    values = bits.view(np.float32 if source == "f32" else np.float64)
    if mode in INTEGRAL:
        return ar.patterns(INTEGRAL[mode](values))
    if to == "f32":
        return ar.patterns(values.astype(np.float32))
    wide = values.astype(np.float64)
    return np.where(np.isnan(wide), np.uint64(0x7FFFFFFFFFFFFFFF), wide.view(np.uint64))
