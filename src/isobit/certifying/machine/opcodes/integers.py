"""Integer arithmetic. Concrete unless an operand depends on float data: then the result is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine.naming import Naming
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.registers import SIGNED, UNSIGNED
from isobit.certifying.machine.state import State
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import unknown

Compute = Callable[..., Array]


def number_type(instruction: Instruction) -> tuple[str, int]:
    """Return the letter (s, u or b) and the width of an instruction's integer type."""
    kind = instruction.parts[-1]
    if kind[:1] not in "sub" or kind[1:] not in ("16", "32", "64"):
        raise unknown(instruction, "type of")
    return kind[0], int(kind[1:])


def quotient(x: Array, y: Array) -> Array:
    """Divide toward zero; by zero gives all ones, as PTX leaves it open and code must not use it."""
    safe = np.where(y == 0, 1, y)
    made = np.floor_divide(x, safe)
    if x.dtype.kind == "i":
        made = made + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    return np.where(y == 0, x.dtype.type(-1) if x.dtype.kind == "i" else ~x.dtype.type(0), made)


def remainder(x: Array, y: Array) -> Array:
    """Return the remainder with the sign of x."""
    safe = np.where(y == 0, 1, y)
    return np.where(y == 0, x, x - quotient(x, safe) * safe)


def high_product(x: Array, y: Array) -> Array:
    """Return the upper half of a product of 16 or 32 bits."""
    width = 8 * x.dtype.itemsize
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    return np.asarray(((x.astype(wide) * y.astype(wide)) >> wide(width)).astype(x.dtype))


def high_product64(x: Array, y: Array) -> Array:
    """Return the upper 64 bits of a product, by Python integers."""
    return np.array([(int(a) * int(b)) >> 64 for a, b in zip(x, y, strict=True)]).astype(x.dtype)


LOW: dict[str, Compute] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": quotient,
    "rem": remainder,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "abs": np.abs,
    "mad": lambda x, y, z: x * y + z,
}
# The bits of these do not depend on whether operands are signed.
UNSIGNED_ALIKE = ("add", "sub", "mul", "mad", "neg")


@decoder("rem", register_only=True)
def integer_arithmetic(instruction: Instruction) -> Step:
    """Decode integer arithmetic of one width, or mul and mad of twice the width."""
    stem, modifiers = instruction.parts[0], set(instruction.parts[1:-1])
    letter, width = number_type(instruction)
    if "wide" in modifiers and modifiers == {"wide"}:
        return wide_product(instruction, letter, width)
    compute: Compute | None = LOW.get(stem)
    if stem in ("mul", "mad") and modifiers == {"hi"}:
        high = high_product64 if width == 64 else high_product
        compute = high if stem == "mul" else (lambda x, y, z: high(x, y) + z)
    elif (modifiers != {"lo"} if stem in ("mul", "mad") else bool(modifiers)) or compute is None:
        raise unknown(instruction, "modifier of")
    alike = stem in UNSIGNED_ALIKE and "hi" not in modifiers
    name = Naming(f"{stem}{'.hi' if 'hi' in modifiers else ''}.{'b' if alike else letter}{width}")
    target, *sources = instruction.operands
    kind: Any = SIGNED[width] if letter == "s" else UNSIGNED[width]

    def step(machine: State, mask: Array | None) -> None:
        with np.errstate(all="ignore"):
            values = [machine.bits(each, width).view(kind) for each in sources]
            bits = compute(*values).astype(kind).view(UNSIGNED[width])
        made = machine.opaque(name, [(each, width) for each in sources], bits, width)
        machine.write(target, bits, mask, made)

    return step


def wide_product(instruction: Instruction, letter: str, width: int) -> Step:
    """Decode mul.wide and mad.wide: a product of twice the width."""
    if width == 64 or letter == "b":
        raise unknown(instruction, "type of")
    target, *sources = instruction.operands
    narrow: Any = SIGNED[width] if letter == "s" else UNSIGNED[width]
    wide: Any = SIGNED[2 * width] if letter == "s" else UNSIGNED[2 * width]
    name = Naming(f"{instruction.parts[0]}.wide.{letter}{width}")
    widths = [width, width, 2 * width][: len(sources)]

    def step(machine: State, mask: Array | None) -> None:
        with np.errstate(all="ignore"):
            x, y = (machine.bits(each, width).view(narrow).astype(wide) for each in sources[:2])
            product = x * y
            if len(sources) > 2:
                product = product + machine.bits(sources[2], 2 * width).view(wide)
        bits = product.view(UNSIGNED[2 * width])
        pairs = list(zip(sources, widths, strict=True))
        machine.write(target, bits, mask, machine.opaque(name, pairs, bits, 2 * width))

    return step


@decoder("bfe", "bfi", "popc", "clz", "brev", "bfind", register_only=True)
def fields(instruction: Instruction) -> Step:
    """Decode bit fields and counts of bits."""
    letter, width = number_type(instruction)
    stem, (target, *sources) = instruction.parts[0], instruction.operands
    widths = {"bfe": [width, 32, 32], "bfi": [width, width, 32, 32]}.get(stem, [width])
    out = width if stem in ("bfe", "bfi", "brev") else 32
    if len(instruction.parts) != 2 or len(sources) != len(widths):
        raise unknown(instruction, "modifier of")
    name = Naming(instruction.opcode)

    def step(machine: State, mask: Array | None) -> None:
        values = [machine.bits(each, w) for each, w in zip(sources, widths, strict=True)]
        bits = FIELDS[stem](letter, width, *values).astype(UNSIGNED[out])
        pairs = list(zip(sources, widths, strict=True))
        machine.write(target, bits, mask, machine.opaque(name, pairs, bits, out))

    return step


def extract(letter: str, width: int, value: Array, at: Array, length: Array) -> Array:
    """Return a field of bits, extended by zeros or by its sign (PTX ISA, bfe)."""
    rows = zip(value.tolist(), (at & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True)
    made = []
    for x, start, count in rows:
        field = (x >> start) & ((1 << count) - 1)
        if letter == "s" and count:
            top = (x >> min(start + count - 1, width - 1)) & 1
            kept = max(0, min(count, width - start))
            field = field & ((1 << kept) - 1)
            field |= (-1 << kept) if top else 0
        made.append(field & ((1 << width) - 1))
    return np.array(made, UNSIGNED[width])


def insert(letter: str, width: int, a: Array, b: Array, at: Array, length: Array) -> Array:
    """Return b with a field of a put at a place (PTX ISA, bfi)."""
    made = []
    for x, y, start, count in zip(
        *(v.tolist() for v in (a, b, at & 0xFF, length & 0xFF)), strict=True
    ):
        field = ((1 << count) - 1) << start
        made.append(((y & ~field) | ((x << start) & field)) & ((1 << width) - 1))
    return np.array(made, UNSIGNED[width])


def each(function: Callable[[int, int], int]) -> Compute:
    """Return a function of arrays from one of a number and the width."""

    def apply(letter: str, width: int, value: Array) -> Array:
        if letter == "s":
            value = value.view(SIGNED[width])
        return np.array([function(int(x), width) & 0xFFFFFFFFFFFFFFFF for x in value], np.uint64)

    return apply


FIELDS: dict[str, Compute] = {
    "bfe": extract,
    "bfi": insert,
    "popc": each(lambda x, width: (x & ((1 << width) - 1)).bit_count()),
    "clz": each(lambda x, width: width - (x & ((1 << width) - 1)).bit_length()),
    "brev": each(lambda x, width: int(f"{x & ((1 << width) - 1):0{width}b}"[::-1], 2)),
    "bfind": each(lambda x, width: (~x if x < 0 else x).bit_length() - 1),
}
