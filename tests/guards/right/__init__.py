"""Correct training programs of many shapes, on which no guard may report anything."""

from tests.guards.right import libraries, loops, networks, objectives, sequences, several_ranks
from tests.guards.right.program import ALONE, TOGETHER

__all__ = [
    "ALONE",
    "TOGETHER",
    "libraries",
    "loops",
    "networks",
    "objectives",
    "sequences",
    "several_ranks",
]
