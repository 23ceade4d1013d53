"""Correct training programs of many shapes, on which no guard may report anything."""

from tests.guards.right import (
    libraries,
    lightning_trainers,
    loops,
    networks,
    objectives,
    sequences,
    several_ranks,
    trl_trainers,
)
from tests.guards.right.program import ALONE, NEEDS, TOGETHER

__all__ = [
    "ALONE",
    "NEEDS",
    "TOGETHER",
    "libraries",
    "lightning_trainers",
    "loops",
    "networks",
    "objectives",
    "sequences",
    "several_ranks",
    "trl_trainers",
]
