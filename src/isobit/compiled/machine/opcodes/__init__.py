"""What each opcode does. Importing this package fills the table."""

from isobit.compiled.machine.opcodes import (
    barrier_objects,
    bitwise,
    bulk_copies,
    conversions,
    copies,
    extremes,
    floats,
    integers,
    moves,
    predicates,
    tcgen05,
    transfers,
    warps,
    wgmma,
)

__all__ = [
    "barrier_objects",
    "bitwise",
    "bulk_copies",
    "conversions",
    "copies",
    "extremes",
    "floats",
    "integers",
    "moves",
    "predicates",
    "tcgen05",
    "transfers",
    "warps",
    "wgmma",
]
