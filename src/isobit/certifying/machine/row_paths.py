"""Does anything but the row mask of a compiled kernel depend on the number of rows?

[Note: every row count]
Names compare the row counts that were executed. What follows for the others can be read from the program. Every integer
register is written as

    position · (number of the program) + rows · (number of rows) + a part that is the same in all programs

where that is possible. If branches and addresses of shared memory have the last part only, addresses of global memory
the first and the last, and the number of rows is only compared with a row's own index to guard the accesses of that
row, then a program does to its rows what the first program does to the first ones: which values meet, and in which
order, is a fixed graph. The executed row counts have shown that in a whole tile this graph takes for a row its own
inputs only, with one expression, so it does for every number of rows: as long as no 32-bit integer overflows, which
gives the largest number of rows.

Anything else is a reason not to say so: a division by the number of rows, a grid that is read (persistent programs), a
row mask in a select, integers that are read from memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from isobit.certifying.machine.opcodes.table import Step
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from isobit.certifying.running.refusals import place

if TYPE_CHECKING:
    from isobit.certifying.machine.machine import Machine
    from isobit.certifying.machine.state import State

WHOLE = {kind for kind in WIDTHS if kind[0] in "sub"}
KEPT = {"mov", "cvta", "cvt"}
LIMIT = 1 << 31  # of 32-bit integers
CHANGES = 20  # of what a register may hold, on average, until a program is given up


@dataclass(frozen=True)
class Number:
    """An integer: position · program + rows · (number of rows) + a part that all programs share.

    Attributes:
        pointer: the tensor argument that it points into, or "".
        position, rows: the two factors.
        value: the shared part, if it is one known number.
        bits: if known, the shared part is not negative and has no other bits than these.
    """

    pointer: str = ""
    position: int = 0
    rows: int = 0
    value: int | None = None
    bits: int | None = None

    @property
    def shared(self) -> bool:
        """Whether it is the same in all programs, whatever the number of rows."""
        return not self.position and not self.rows

    def plus(self, other: Number, sign: int = 1) -> Number | Unknown:
        """Return a sum or a difference."""
        if self.pointer and other.pointer:
            return Unknown("a difference of pointers")
        value = None
        if self.value is not None and other.value is not None:
            value = self.value + sign * other.value
        bits = None
        if self.bits is not None and other.bits is not None and sign == 1:
            bits = bits_of_sum(self.bits, other.bits)
        return Number(
            self.pointer or other.pointer,
            self.position + sign * other.position,
            self.rows + sign * other.rows,
            value,
            bits,
        )

    def times(self, factor: int) -> Number:
        """Return a product with a known number."""
        return Number(
            "",
            self.position * factor,
            self.rows * factor,
            None if self.value is None else self.value * factor,
            None if self.bits is None or factor < 0 else bits_up_to(self.bits, factor),
        )


@dataclass(frozen=True)
class RowMask:
    """A predicate that holds where rows of a thread are in range: the comparisons that made it."""

    comparisons: frozenset[int]
    outside: bool = False  # it holds where they are not
    joined: bool = False  # together with a condition that all programs share


@dataclass(frozen=True)
class CopySize:
    """The size of an asynchronous copy, 0 where a row mask does not hold."""

    mask: RowMask


@dataclass(frozen=True)
class Unknown:
    """Something that depends on the rows in a way that is not one of the others."""

    why: str


Value = Union[Number, RowMask, CopySize, Unknown]  # noqa: UP007
SHARED = Number()


@dataclass(frozen=True)
class RowTensor:
    """A tensor argument: bytes from a row to the next, 0 if it has no rows."""

    row_bytes: int = 0


class NotShownError(Exception):
    """Why nothing follows for other row counts."""


@dataclass
class RowPaths:
    """Follows the number of rows and the position of programs through a program.

    Args:
        program: the compiled kernel.
        arguments: of its parameters by name: tensors, or numbers as `Number` says.
        axis: the axis of the grid that follows the rows, such as "x", or "" if none does.
        rows: the number of rows of the launch that is watched.
        multiple: every number of rows that launches this program is a multiple of it: Triton compiles another program
            for multiples of 16, in which one comparison serves 16 rows.
    """

    program: Program
    arguments: Mapping[str, RowTensor | Value]
    axis: str
    rows: int
    multiple: int = 1
    registers: dict[int, Value] = field(default_factory=dict)
    factors: dict[int, int] = field(default_factory=dict)  # comparison -> number / rows
    masked: dict[int, RowMask] = field(default_factory=dict)  # access -> its row mask
    tensors: dict[int, str] = field(default_factory=dict)  # access -> the tensor
    per_program: Fraction = Fraction(0)  # rows
    compared: dict[int, Array] = field(default_factory=dict)  # the last row indices, per thread
    widest: dict[int, int] = field(default_factory=dict)  # 32-bit register -> largest shared part
    checked: int = 0  # accesses with a row mask, of programs all of whose rows are there

    # ---- the program, without executing it ------------------------------------------------------
    def follow(self) -> RowPaths:
        """Find what every register holds, and look at every use of it.

        Raises:
            NotShownError: If something else than a row mask depends on the rows.
        """
        writers: dict[int, list[Instruction]] = {}
        readers: dict[int, set[int]] = {}
        for each in self.program.instructions:
            for target in targets_of(each):
                writers.setdefault(target, []).append(each)
                for source in sources_of(each):
                    readers.setdefault(source, set()).add(target)
        work, left = list(reversed(writers)), CHANGES * len(writers)
        while work:
            index = work.pop()
            found = self.written(writers[index])
            if found != self.registers.get(index):
                self.registers[index] = found
                work += sorted(readers.get(index, ()), reverse=True)
                left -= 1
                if left < 0:
                    raise NotShownError(f"{self.program.name} has loops that were not followed")
        self.factors.clear()
        for found_in in writers.values():  # comparisons, as they are in the end
            self.written(found_in)
        for each in self.program.instructions:
            self.look_at(each)
        self.find_rows_of_programs()
        return self

    def value(self, operand: Operand) -> Value:
        """Return what an operand holds."""
        if isinstance(operand, Register):
            return self.registers.get(operand.index, SHARED)
        if isinstance(operand, Immediate):
            known = operand.value if operand.kind == "int" else None
            return constant(known) if known is not None else SHARED
        if isinstance(operand, Special):
            return self.special(operand.name)
        if isinstance(operand, Address):
            return self.value(operand.base)
        if isinstance(operand, (Vector, Pair)):
            items = items_of(operand)
            return next((v for each in items if not is_shared(v := self.value(each))), SHARED)
        return SHARED

    def special(self, name: str) -> Value:
        """Return what a special register holds."""
        kind, _, axis = name.partition(".")
        if axis == self.axis and kind in ("%ctaid", "%clusterid"):
            return replace(constant(0), position=1)
        if kind in ("%nctaid", "%nclusterid"):
            return Unknown("the size of the grid")
        below = {
            "%tid.x": self.program.threads,
            "%laneid": 32,
            "%warpid": self.program.threads // 32,
        }
        if name in below:
            return Number(bits=(1 << (below[name] - 1).bit_length()) - 1)
        return SHARED

    def written(self, writers: list[Instruction]) -> Value:
        """Return what a register holds that these instructions write."""
        found: Value | None = None
        for each in writers:
            made, guard = self.result(each), each.guard
            if isinstance(each.operands[0], (Pair, Vector)) and not is_shared(made):
                made = Unknown(f"two results of {each.opcode}, at {place(each)}")
            if (
                guard is not None
                and not is_load(each)
                and not is_shared(self.value(guard.register))
            ):
                made = Unknown(f"a write under a condition that follows the rows, at {place(each)}")
            found = made if found is None else join(found, made)
        assert found is not None
        return found

    def result(self, instruction: Instruction) -> Value:
        """Return what an instruction computes."""
        parts, operands = instruction.parts, instruction.operands
        if instruction.opcode.startswith("ld.param"):
            return self.parameter(instruction)
        if parts[0] in ("ld", "ldmatrix", "cp") or is_load(instruction):
            return SHARED  # addresses are looked at apart
        sources = [self.value(each) for each in operands[1:]]
        if parts[0] == "setp":
            return self.comparison(instruction, sources)
        if all(map(is_shared, sources)):
            return self.shared_result(instruction, sources)
        for each in sources:
            if isinstance(each, Unknown):
                return each
        if parts[-1] == "pred":
            return join_masks(parts[0], sources)
        if parts[0] == "selp":
            return copy_size(operands, sources)
        if parts[-1] in WHOLE and all(isinstance(each, Number) for each in sources):
            numbers = [each for each in sources if isinstance(each, Number)]
            found = linear(instruction, numbers)
            if found is not None:
                return found
        return Unknown(f"{instruction.opcode}, at {place(instruction)}")

    def parameter(self, instruction: Instruction) -> Value:
        """Return what a parameter of the launch holds."""
        source = instruction.operands[1]
        assert isinstance(source, Address)
        name = source.base.name if isinstance(source.base, Symbol) else ""
        found = self.arguments.get(name, SHARED)
        return replace(constant(0), pointer=name) if isinstance(found, RowTensor) else found

    def comparison(self, instruction: Instruction, sources: list[Value]) -> Value:
        """Return a row mask if a row's index is compared with the number of rows."""
        if all(map(is_shared, sources)):
            return SHARED
        for each in sources:
            if isinstance(each, Unknown):
                return each
        left, right = sources[0], sources[1]
        relation = next((p for p in instruction.parts[1:] if p in ("lt", "gt", "le", "ge")), "")
        numbers = isinstance(left, Number) and isinstance(right, Number)
        if relation and numbers and len(sources) == 2 and instruction.parts[-1] in WHOLE:
            assert isinstance(left, Number)
            assert isinstance(right, Number)
            index, count = (left, right) if relation in ("lt", "ge") else (right, left)
            outside = relation in ("le", "ge")
            whole = not count.position and count.rows > 0 and count.value == 0
            if whole and not index.rows and not index.pointer and not count.pointer:
                self.factors[instruction.index] = count.rows
                return RowMask(frozenset({instruction.index}), outside)
        return Unknown(f"a comparison that is no row mask, at {place(instruction)}")

    @staticmethod
    def shared_result(instruction: Instruction, sources: list[Value]) -> Value:
        """Return a number that all programs share, with what is known of it."""
        numbers = [each for each in sources if isinstance(each, Number)]
        if instruction.parts[-1] not in WHOLE or len(numbers) != len(sources):
            return SHARED
        if any(each.pointer for each in numbers):
            found = linear(instruction, numbers)
            return found if found is not None else Unknown(f"a pointer in {instruction.opcode}")
        return linear(instruction, numbers) or bounded(instruction, numbers)

    # ---- its uses -------------------------------------------------------------------------------
    def look_at(self, instruction: Instruction) -> None:
        """Refuse a use that is not one of those in [Note: every row count]."""
        where = f", at {place(instruction)}"
        guard = SHARED if instruction.guard is None else self.value(instruction.guard.register)
        parts = instruction.parts
        if parts[0] in ("bra", "ret", "exit"):
            if not is_shared(guard):
                raise NotShownError(f"a branch follows the rows{where}")
            return
        if instruction.opcode.startswith("ld.param"):
            return
        if parts[0] in ("atom", "red"):
            raise NotShownError(f"an atomic instruction{where}")
        if is_global(instruction):
            self.look_at_access(instruction, guard, where)
            return
        if not is_shared(guard) and not is_load(instruction):
            raise NotShownError(f"an instruction is guarded by rows: {instruction.opcode}{where}")
        uses = [each for each in instruction.operands if isinstance(each, Address)]
        if uses or writes_nothing(instruction):
            for each in instruction.operands:
                if not is_shared(found := self.value(each)):
                    raise NotShownError(f"{why(found)} in {instruction.opcode}{where}")

    def look_at_access(self, instruction: Instruction, guard: Value, where: str) -> None:
        """Look at a load, a store or a copy of global memory."""
        parts, operands = instruction.parts, instruction.operands
        copies = parts[0] == "cp"
        source = operands[0] if parts[0] == "st" else operands[1]
        others = [each for each in operands if each is not source]
        if copies and len(operands) > 3:
            size = self.value(operands[3])
            others.remove(operands[3])
            if isinstance(size, CopySize):
                guard = size.mask if is_shared(guard) else Unknown("two masks of a copy")
            elif not is_shared(size):
                raise NotShownError(f"{why(size)} is the size of a copy{where}")
        if parts[0] == "st" or copies:
            for each in others:
                if not is_shared(found := self.value(each)):
                    raise NotShownError(f"{why(found)} is stored{where}")
        address = self.value(source)
        if not isinstance(address, Number) or not address.pointer or address.rows:
            raise NotShownError(f"{why(address)} is an address{where}")
        tensor = self.arguments[address.pointer]
        assert isinstance(tensor, RowTensor)
        self.tensors[instruction.index] = address.pointer
        if not is_shared(guard):
            if not isinstance(guard, RowMask) or guard.outside:
                raise NotShownError(f"{why(guard)} guards an access{where}")
            if not tensor.row_bytes:
                raise NotShownError(f"a row mask guards a tensor without rows{where}")
            self.masked[instruction.index] = guard
        rows = Fraction(address.position, tensor.row_bytes) if tensor.row_bytes else Fraction(0)
        if address.position and not tensor.row_bytes:
            raise NotShownError(
                f"programs of other rows read another part of a tensor without rows{where}"
            )
        if tensor.row_bytes:
            if self.per_program not in (0, rows):
                raise NotShownError(
                    f"a program has other rows of one tensor than of another{where}"
                )
            if rows <= 0:
                raise NotShownError(f"all programs use the same rows{where}")
            self.per_program = rows

    def find_rows_of_programs(self) -> None:
        """Compare the rows of a program with the steps of the indices in its row masks."""
        if not self.per_program:
            raise NotShownError("no access follows the rows")
        for at, factor in self.factors.items():
            each = self.program.instructions[at]
            left, right = (self.value(o) for o in each.operands[1:3])
            index = next(v for v in (left, right) if isinstance(v, Number) and not v.rows)
            used = any(at in mask.comparisons for mask in self.masked.values())
            if used and index.position != factor * self.per_program:
                raise NotShownError(
                    f"a row mask counts {index.position} per program, which has {self.per_program} rows, at "
                    f"{place(each)}"
                )

    # ---- while it is executed -------------------------------------------------------------------
    def watch(self, machine: Machine) -> None:
        """Let a machine check row masks against addresses, and note how large 32-bit integers are."""
        for at, each in enumerate(self.program.instructions):
            if at in self.factors:
                machine.steps[at] = self.noting_comparison(each, machine.steps[at])
            elif at in self.masked:
                machine.steps[at] = self.checking_mask(each, machine.steps[at])
            elif each.operands and isinstance(each.operands[0], Register):
                found = self.registers.get(each.operands[0].index)
                if isinstance(found, Number) and not found.shared and each.operands[0].width == 32:
                    machine.steps[at] = self.noting_width(
                        each.operands[0], found, machine.steps[at]
                    )

    def noting_comparison(self, instruction: Instruction, inner: Step) -> Step:
        """Return what runs a comparison and keeps the index that it compares."""
        operands, width = instruction.operands[1:3], WIDTHS[instruction.parts[-1]]
        index = next(o for o in operands if isinstance(v := self.value(o), Number) and not v.rows)

        def step(machine: State, mask: Array | None) -> None:
            inner(machine, mask)
            bits = machine.bits(index, width)
            self.compared[instruction.index] = bits.astype(f"u{width // 8}").view(f"i{width // 8}")

        return step

    def checking_mask(self, instruction: Instruction, inner: Step) -> Step:
        """Return what runs an access and checks that its mask is that of the rows that it uses."""
        tensor = self.arguments[self.tensors[instruction.index]]
        assert isinstance(tensor, RowTensor)
        source = instruction.operands[0 if instruction.parts[0] == "st" else 1]
        base = self.tensors[instruction.index]

        def step(machine: Any, mask: Array | None) -> None:
            inner(machine, mask)
            first = np.int64(machine.parameters[base])
            rows = (machine.address(source).astype(np.int64) - first) // tensor.row_bytes
            active = np.ones(len(rows), bool) if mask is None else mask
            if instruction.parts[0] == "cp" and len(instruction.operands) > 3:
                active = active & (machine.bits(instruction.operands[3], 32) > 0)
            program = int(machine.special[f"%ctaid.{self.axis}"][0])
            whole = (program + 1) * self.per_program <= self.rows
            for at in self.masked[instruction.index].comparisons:
                indices, factor = self.compared[at], self.factors[at]
                if whole and (indices >= factor * self.rows).any():
                    raise NotShownError(
                        f"a mask leaves out rows that are there, at {place(instruction)}"
                    )
                mine, its = indices[active], rows[active]
                if not np.array_equal(mine // factor, its) and not np.array_equal(
                    mine // self.multiple, factor * its // self.multiple
                ):
                    raise NotShownError(
                        f"a mask is not that of the rows that it guards, at {place(instruction)}"
                    )
            self.checked += whole

        return step

    def noting_width(self, target: Register, found: Number, inner: Step) -> Step:
        """Return what runs an instruction and notes the largest shared part of its result."""
        of_rows = found.rows * self.rows

        def step(machine: State, mask: Array | None) -> None:
            inner(machine, mask)
            program = int(machine.special[f"%ctaid.{self.axis}"][0]) if self.axis else 0
            values = machine.values[target.index]
            if values is None or (mask is not None and not mask.any()):
                return
            numbers = values.astype(np.uint32).view(np.int32).astype(np.int64)
            numbers = numbers - (found.position * program + of_rows)
            numbers = numbers if mask is None else numbers[mask]
            if numbers.min() < 0:
                raise NotShownError(
                    f"an index of rows that is negative, at {place(machine.current)}"
                )
            most = max(self.widest.get(target.index, 0), int(numbers.max()))
            self.widest[target.index] = most

        return step

    def most_rows(self) -> int:
        """Return the largest number of rows at which no 32-bit integer overflows."""
        limit = LIMIT - 1
        for index, most in self.widest.items():
            found = self.registers[index]
            assert isinstance(found, Number)
            # Of the first program and of the last, whichever is larger or more negative.
            first, last = Fraction(found.rows), found.rows + found.position / self.per_program
            if per_row := max(abs(first), abs(last)):
                limit = min(limit, int((LIMIT - 1 - most) / per_row))
        return limit


def constant(value: int) -> Number:
    """Return a number that is known."""
    return Number(value=value, bits=value if value >= 0 else None)


def bits_up_to(bits: int, factor: int) -> int:
    """Return the bits that a product with a known number may have."""
    if not factor or not bits:
        return 0
    low = (bits & -bits) * (factor & -factor)
    if factor & (factor - 1) == 0:
        return bits * factor
    return ((1 << (bits * factor).bit_length()) - 1) & -low


def bits_of_sum(first: int, second: int) -> int:
    """Return the bits that a sum may have."""
    if not first & second:
        return first | second
    both = first | second
    return ((1 << (first + second).bit_length()) - 1) & -(both & -both)


def why(found: Value) -> str:
    """Name what an operand holds, for messages."""
    if isinstance(found, Unknown):
        return found.why
    if isinstance(found, Number):
        return "the number of rows" if found.rows else "a row's position"
    return "a row mask"


def is_shared(found: Value) -> bool:
    """Tell whether something is the same in all programs, whatever the number of rows."""
    return isinstance(found, Number) and found.shared


def is_load(instruction: Instruction) -> bool:
    """Tell whether an instruction loads from memory into registers."""
    return instruction.parts[0] in ("ld", "ldu")


def is_global(instruction: Instruction) -> bool:
    """Tell whether an instruction loads, stores or copies global memory, by addresses in registers."""
    parts = instruction.parts
    if parts[:2] == ("cp", "async") and len(parts) > 2 and parts[2] in ("ca", "cg"):
        return True
    return parts[0] in ("ld", "st", "ldu") and "global" in parts


def writes_nothing(instruction: Instruction) -> bool:
    """Tell whether an instruction has no result in a register."""
    first = instruction.operands[0] if instruction.operands else None
    return not isinstance(first, (Register, Vector, Pair, Sink)) or instruction.parts[0] in (
        "st",
        "bar",
        "barrier",
        "cp",
        "mbarrier",
        "red",
    )


def items_of(operand: Operand) -> tuple[Operand, ...]:
    """Return the operands that an operand consists of."""
    if isinstance(operand, Vector):
        return operand.items
    if isinstance(operand, Pair):
        return (operand.first, operand.second)
    return (operand.base,) if isinstance(operand, Address) else (operand,)


def targets_of(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction writes."""
    if not instruction.operands or writes_nothing(instruction):
        return []
    return [each.index for each in items_of(instruction.operands[0]) if isinstance(each, Register)]


def sources_of(instruction: Instruction) -> list[int]:
    """Return the registers that an instruction reads, its guard among them."""
    found = [
        o.index
        for each in instruction.operands[1:]
        for o in items_of(each)
        if isinstance(o, Register)
    ]
    return found + ([instruction.guard.register.index] if instruction.guard else [])


def join(old: Value, new: Value) -> Value:
    """Return what a register holds that is written twice."""
    if old == new:
        return old
    if isinstance(old, Unknown):
        return old
    if isinstance(old, Number) and isinstance(new, Number):
        mine, its = (replace(each, value=None, bits=None) for each in (old, new))
        if mine == its:
            value = old.value if old.value == new.value else None
            known = old.bits is not None and new.bits is not None
            return replace(
                mine, value=value, bits=(old.bits or 0) | (new.bits or 0) if known else None
            )
    if isinstance(new, Unknown):
        return new
    return Unknown("a register that follows the rows in two ways")


def join_masks(operation: str, sources: list[Value]) -> Value:
    """Return a predicate that is made of row masks and conditions that all programs share."""
    masks = [each for each in sources if isinstance(each, RowMask)]
    rest = [each for each in sources if not isinstance(each, RowMask)]
    if len(masks) + sum(map(is_shared, rest)) == len(sources):
        if operation == "and" and not any(each.outside for each in masks):
            every = frozenset().union(*(each.comparisons for each in masks))
            return RowMask(every, joined=bool(rest) or any(each.joined for each in masks))
        if operation == "mov" and len(masks) == 1:
            return masks[0]
        alone = len(masks) == 1 and not masks[0].joined and len(masks[0].comparisons) == 1
        if operation == "not" and alone:
            return replace(masks[0], outside=not masks[0].outside)
    return Unknown(f"a row mask in {operation}.pred")


def copy_size(operands: tuple[Operand, ...], sources: list[Value]) -> Value:
    """Return the size of a copy, if a row mask selects a number or 0."""
    chosen, numbers = sources[-1], [each for each in operands[1:3] if isinstance(each, Immediate)]
    whole = len(numbers) == 2 and all(each.kind == "int" for each in numbers)
    if isinstance(chosen, RowMask) and not chosen.outside and whole and numbers[1].value == 0:
        return CopySize(chosen)
    return Unknown("a row mask in a select")


def linear(instruction: Instruction, numbers: list[Number]) -> Value | None:
    """Return the result of an instruction that is linear in its operands, or None if it is not one."""
    parts = instruction.parts
    operation = parts[0]
    if operation in KEPT and len(numbers) == 1:
        target, source = instruction.operands[:2]
        kinds = parts[-2:] if operation == "cvt" else parts[-1:]
        wide = all(WIDTHS.get(each, 64) >= 32 for each in kinds)
        good = operation != "cvt" or all(each in WHOLE for each in kinds)
        # A register of halves, or made of halves, is another number.
        whole = isinstance(target, Register) and not isinstance(source, (Vector, Pair))
        return numbers[0] if good and wide and whole else None
    if operation in ("add", "sub") and len(numbers) == 2 and len(parts) == 2:
        return numbers[0].plus(numbers[1], 1 if operation == "add" else -1)
    if operation == "shl" and len(numbers) == 2 and numbers[1].value is not None:
        if numbers[1].shared and 0 <= numbers[1].value < 32 and not numbers[0].pointer:
            return numbers[0].times(1 << numbers[1].value)
        return None
    if operation in ("mul", "mad") and parts[1] in ("lo", "wide"):
        first, second = numbers[0], numbers[1]
        if first.shared and first.value is not None:
            first, second = second, first
        known = second.value if second.shared and not second.pointer else None
        if known is None or first.pointer:
            return None
        made = first.times(known)
        return made if operation == "mul" else made.plus(numbers[2])
    if operation in ("or", "xor", "add") and len(numbers) == 2:
        first, second = numbers
        if first.shared:
            first, second = second, first
        if not second.shared or second.bits is None or first.bits is None or first.pointer:
            return None
        step = 1 << second.bits.bit_length()
        # no bit of one is in the other
        if not first.position % step and not first.rows % step and not first.bits & second.bits:
            return first.plus(second)
    return None


def bounded(instruction: Instruction, numbers: list[Number]) -> Number:
    """Return a number that all programs share, with its bound where it is simple to say."""
    operation, unsigned = instruction.parts[0], instruction.parts[-1][0] in "ub"
    bits = [each.bits for each in numbers]
    known = [each for each in bits if each is not None]
    last = numbers[-1].value if numbers else None
    if operation == "and" and known:
        return Number(bits=known[0] if len(known) == 1 else known[0] & known[1])
    if operation == "bfe" and len(numbers) == 3 and last is not None and unsigned:
        return Number(bits=(1 << last) - 1)
    if operation in ("or", "xor") and len(known) == 2:
        return Number(bits=known[0] | known[1])
    if operation == "shr" and unsigned and bits[0] is not None and last is not None:
        return Number(bits=bits[0] >> last)
    return SHARED
