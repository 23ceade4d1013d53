"""What each opcode does. Importing this package fills the table."""

from isobit.certifying.machine.opcodes import (
    atomics,
    bitwise,
    conversions,
    copies,
    extremes,
    floats,
    integers,
    moves,
    predicates,
    transfers,
    warps,
)

__all__ = [
    "atomics",
    "bitwise",
    "conversions",
    "copies",
    "extremes",
    "floats",
    "integers",
    "moves",
    "predicates",
    "transfers",
    "warps",
]
