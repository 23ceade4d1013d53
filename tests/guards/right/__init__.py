"""Correct training programs of many shapes, on which no guard may report anything."""

from importlib.util import find_spec

from tests.guards.right import libraries, loops, networks, several_ranks
from tests.guards.right.program import ALONE, TOGETHER

if find_spec("trl") and find_spec("datasets"):
    from tests.guards.right import with_trl  # noqa: F401

__all__ = ["ALONE", "TOGETHER", "libraries", "loops", "networks", "several_ranks"]
