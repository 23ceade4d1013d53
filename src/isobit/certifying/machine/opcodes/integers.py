"""Integer arithmetic. Concrete unless an operand depends on float data: then the result is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine.naming import Naming
from isobit.certifying.machine.opcodes.table import Step, decoder
from isobit.certifying.machine.predicates import negated
from isobit.certifying.machine.registers import SIGNED, UNSIGNED, Word, normal
from isobit.certifying.machine.state import State
from isobit.certifying.names import names as nm
from isobit.certifying.names.names import Array, Names, byte_of, half_of_bytes
from isobit.certifying.ptx.program import Immediate, Instruction, Operand
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


# Bitwise operations, shifts and permutations of bytes; whole 16-bit halves keep their names.

ONES = np.uint64(0xFFFF)
COMPUTE: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def half_list(machine: State, operand: Operand, width: int) -> list[Names]:
    """Return the halves of an operand of 16, 32 or 64 bits, the lowest first."""
    made = machine.names_of(operand, width)
    if width == 16:
        return [made]
    words = [made] if width == 32 else list(made)
    return [half for word in words for half in word.halves]


def from_halves(halves: list[Names]) -> Any:
    """Return names in the form of a register from its halves; None if all are constants."""
    made: Any = halves[0]
    if len(halves) == 2:
        made = Word(low=halves[0], high=halves[1])
    elif len(halves) == 4:
        made = (Word(low=halves[0], high=halves[1]), Word(low=halves[2], high=halves[3]))
    return normal(16 * len(halves), made)


def combine(stem: str, a: Names, b: Names) -> Names:
    """Return the halves of a bitwise operation: a mask of ones or zeros keeps a half's name."""
    made = nm.VALUE | nm.make(f"{stem} half", *nm.ordered(a, b))
    zero, ones = nm.FIXED, nm.FIXED | ONES
    both = (a & b) >= nm.FIXED
    value = COMPUTE[stem](a & ONES, b & ONES)
    made = np.where(both, nm.FIXED | value, made)
    neutral, absorbing = (ones, zero) if stem == "and" else (zero, ones)
    made = np.where(b == neutral, a, np.where(a == neutral, b, made))
    if stem != "xor":
        made = np.where((a == absorbing) | (b == absorbing), absorbing, made)
    return made


@decoder("and", "or", "xor", "not", register_only=True)
def bitwise(instruction: Instruction) -> Step:
    """Decode and, or, xor and not, of bits or of predicates."""
    if len(instruction.parts) != 2:
        raise unknown(instruction, "modifier of")
    if instruction.parts[1] == "pred":
        return of_predicates(instruction)
    letter, width = number_type(instruction)
    if letter != "b":
        raise unknown(instruction, "type of")
    stem, (target, *sources) = instruction.parts[0], instruction.operands
    if stem == "not":
        stem, sources = "xor", [*sources, Immediate(-1, "int")]
    compute = COMPUTE[stem]

    def step(machine: State, mask: Array | None) -> None:
        bits = compute(machine.bits(sources[0], width), machine.bits(sources[1], width))
        made = None
        if machine.names and (machine.tainted(sources[0]) or machine.tainted(sources[1])):
            a, b = (half_list(machine, each, width) for each in sources)
            made = from_halves([combine(stem, x, y) for x, y in zip(a, b, strict=True)])
        machine.write(target, bits, mask, made)

    return step


def of_predicates(instruction: Instruction) -> Step:
    """Decode a bitwise operation of predicates."""
    stem, (target, *sources) = instruction.parts[0], instruction.operands

    def step(machine: State, mask: Array | None) -> None:
        values = [machine.bits(each, 1) for each in sources]
        bits = ~values[0] if stem == "not" else COMPUTE[stem](*values)
        made = None
        if machine.names and any(map(machine.tainted, sources)):
            named = [machine.names_of(each, 1) for each in sources]
            made = negated(named[0]) if stem == "not" else join_predicates(stem, *named)
            made = normal(1, made)
        machine.write(target, bits, mask, made)

    return step


def join_predicates(stem: str, a: Names, b: Names) -> Names:
    """Return the names of a bitwise operation of predicates, constants folded."""
    false, true = nm.constant_predicate(0), nm.constant_predicate(1)
    made = nm.make(f"{stem} predicate", *nm.ordered(a, b))
    both = nm.is_constant(a & b)
    value = nm.constant_predicate(COMPUTE[stem](a & np.uint64(1), b & np.uint64(1)))
    made = np.where(both, value, made)
    neutral, absorbing = (true, false) if stem == "and" else (false, true)
    made = np.where(b == neutral, a, np.where(a == neutral, b, made))
    if stem != "xor":
        made = np.where((a == absorbing) | (b == absorbing), absorbing, made)
    return made


@decoder("shl", "shr", register_only=True)
def shift(instruction: Instruction) -> Step:
    """Decode a shift; by whole halves it keeps their names."""
    letter, width = number_type(instruction)
    if len(instruction.parts) != 2:
        raise unknown(instruction, "modifier of")
    left, (target, source, amount) = instruction.parts[0] == "shl", instruction.operands
    signed = letter == "s" and not left
    kind: Any = SIGNED[width] if signed else UNSIGNED[width]
    name = Naming(f"{'shl' if left else 'shr'}.{'s' if signed else 'b'}{width}")
    count = amount.value if isinstance(amount, Immediate) else -1
    moved = count // 16 if count % 16 == 0 and 0 <= count < width and not signed else None

    def step(machine: State, mask: Array | None) -> None:
        value, by = machine.bits(source, width).view(kind), machine.bits(amount, 32)
        limit = np.minimum(by, width - 1).astype(kind)
        bits = value << limit if left else value >> limit
        if not signed:
            bits = np.where(by >= width, kind(0), bits)
        bits = np.ascontiguousarray(bits).view(UNSIGNED[width])
        made = None
        if machine.names and moved is not None and machine.tainted(source):
            halves, zeros = half_list(machine, source, width), np.full(machine.threads, nm.FIXED)
            empty, kept = [zeros] * moved, len(halves) - moved
            made = from_halves(empty + halves[:kept] if left else halves[moved:] + empty)
        elif machine.names:
            made = machine.opaque(name, [(source, width), (amount, 32)], bits, width)
        machine.write(target, bits, mask, made)

    return step


@decoder("shf", register_only=True)
def funnel_shift(instruction: Instruction) -> Step:
    """Decode a shift of two registers joined together."""
    parts = instruction.parts
    if len(parts) != 4 or parts[1] not in "lr" or parts[2] not in ("wrap", "clamp"):
        raise unknown(instruction, "modifier of")
    target, low, high, amount = instruction.operands
    left, wrap, name = parts[1] == "l", parts[2] == "wrap", Naming(".".join(parts))

    def step(machine: State, mask: Array | None) -> None:
        joined = machine.bits(low, 32).astype(np.uint64) | (
            machine.bits(high, 32).astype(np.uint64) << np.uint64(32)
        )
        by = machine.bits(amount, 32)
        by = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
        bits = joined >> (np.uint64(32) - by) if left else joined >> by
        made = None
        if machine.names:
            made = machine.opaque(name, [(each, 32) for each in (low, high, amount)], bits, 32)
            fixed = isinstance(amount, Immediate) and amount.value == 16
            if made is not None and fixed:
                a, b = half_list(machine, low, 32), half_list(machine, high, 32)
                made = from_halves([a[1], b[0]])
        machine.write(target, bits.astype(np.uint32), mask, made)

    return step


@decoder("lop3", register_only=True)
def logic_of_three(instruction: Instruction) -> Step:
    """Decode any bitwise function of three operands, given by its table."""
    target, *sources, table = instruction.operands
    if instruction.parts != ("lop3", "b32") or not isinstance(table, Immediate):
        raise unknown(instruction, "modifier of")
    name = Naming(f"lop3 {table.value:#x}")

    def step(machine: State, mask: Array | None) -> None:
        a, b, c = (machine.bits(each, 32) for each in sources)
        bits = np.zeros(machine.threads, np.uint32)
        for i in range(8):
            if table.value >> i & 1:
                x, y, z = (v if i >> (2 - j) & 1 else ~v for j, v in enumerate((a, b, c)))
                bits |= x & y & z
        made = machine.opaque(name, [(each, 32) for each in sources], bits, 32)
        machine.write(target, bits, mask, made)

    return step


@decoder("prmt", register_only=True)
def permute(instruction: Instruction) -> Step:
    """Decode a choice of four bytes from eight; whole halves keep their names."""
    if instruction.parts != ("prmt", "b32"):
        raise unknown(instruction, "modifier of")
    target, low, high, selector = instruction.operands
    name = Naming("prmt.b32")

    def step(machine: State, mask: Array | None) -> None:
        joined = machine.bits(low, 32).astype(np.uint64) | (
            machine.bits(high, 32).astype(np.uint64) << np.uint64(32)
        )
        choice = machine.bits(selector, 32).astype(np.uint64)
        bits = np.zeros(machine.threads, np.uint64)
        for i in range(4):
            nibble = (choice >> np.uint64(4 * i)) & np.uint64(15)
            byte = (joined >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            sign = np.where(byte >> np.uint64(7), np.uint64(0xFF), np.uint64(0))
            bits |= np.where(nibble >> np.uint64(3), sign, byte) << np.uint64(8 * i)
        sources = [(low, 32), (high, 32), (selector, 32)]
        made = machine.opaque(name, sources, bits, 32)
        if made is not None and isinstance(selector, Immediate):
            made = permuted(machine, low, high, selector.value, made)
        machine.write(target, bits.astype(np.uint32), mask, made)

    return step


def permuted(machine: State, low: Operand, high: Operand, selector: int, made: Any) -> Any:
    """Return the names after a permutation by a constant, byte by byte."""
    nibbles = [(selector >> 4 * i) & 15 for i in range(4)]
    if any(each & 8 for each in nibbles):
        return made
    halves = [*half_list(machine, low, 32), *half_list(machine, high, 32)]
    out = []
    for first, second in (nibbles[:2], nibbles[2:]):
        if first % 2 == 0 and second == first + 1:
            out.append(halves[first // 2])
        else:
            a, b = (byte_of(halves[each // 2], each % 2) for each in (first, second))
            out.append(half_of_bytes(a, b))
    return from_halves(out)
