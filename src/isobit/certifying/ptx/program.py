"""A parsed PTX kernel: registers, instructions with their operands, labels, parameters, symbols."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Union

# Bits of a register of each declared type; a predicate has one.
WIDTHS = {
    "pred": 1,
    **{f"{letter}{bits}": bits for letter in "bus" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "f32": 32,
    "f64": 64,
    "f32x2": 64,
}


@dataclass(frozen=True)
class Register:
    """A declared register; `index` is its place in the register file of the machine."""

    name: str
    type: str
    index: int

    @property
    def width(self) -> int:
        """Bits; 1 for a predicate."""
        return WIDTHS[self.type]


@dataclass(frozen=True)
class Special:
    """A special register that a thread reads, such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number in the text; `value` has the bits of a float (0f, 0d) or the integer itself."""

    value: int
    kind: str  # "int", "f32" or "f64"


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter, or a variable in shared or global memory."""

    name: str


@dataclass(frozen=True)
class Sink:
    """The operand `_`: a result that is not kept."""


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two results of one instruction: `%p|%q`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """An operand in brackets: a register, symbol or number, and an offset in bytes."""

    base: Operand
    offset: int


Operand = Union[Register, Special, Immediate, Symbol, Sink, Vector, Pair, Address]  # noqa: UP007


@dataclass(frozen=True)
class Guard:
    """`@%p` or `@!%p`."""

    register: Register
    negated: bool


@dataclass
class Instruction:
    """One instruction; `line` is its line in the PTX text, `source` the Python file and line."""

    guard: Guard | None
    opcode: str
    operands: tuple[Operand, ...]
    line: int
    source: tuple[str, int] | None
    text: str
    index: int
    call_sites: tuple[tuple[str, int], ...] = ()  # where inlined code was called, innermost first
    parts: tuple[str, ...] = field(init=False)  # the opcode between its dots

    def __post_init__(self) -> None:
        self.parts = tuple(self.opcode.split("."))


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel."""

    type: str
    name: str
    size: int = 0  # bytes of an array parameter, such as a tensor map; 0 for a scalar


@dataclass(frozen=True)
class Variable:
    """A variable in shared or global memory; the size of an `extern` array is given at launch."""

    name: str
    space: str
    align: int
    size: int
    data: bytes | None = None


@dataclass
class Program:
    """One kernel of a PTX module."""

    name: str
    target: str
    threads: int
    parameters: list[Parameter] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that the text itself declares."""
        return sum(each.size for each in self.variables.values() if each.space == "shared")
