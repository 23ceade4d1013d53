"""PTX text and what it means: the parser and the program that it returns."""

from isobit.certifying.ptx.parser import parse
from isobit.certifying.ptx.program import (
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

__all__ = [
    "Address",
    "Immediate",
    "Instruction",
    "Operand",
    "Pair",
    "Program",
    "Register",
    "Sink",
    "Special",
    "Symbol",
    "Vector",
    "parse",
]
