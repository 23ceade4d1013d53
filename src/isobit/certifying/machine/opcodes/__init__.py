"""What each opcode does. Importing this package fills the table."""

from isobit.certifying.machine.opcodes import conversions, floats, integers, moves, transfers, warps

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
