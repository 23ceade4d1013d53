"""Every operation of a run by the name of its result, so that expressions can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isobit.compiled.names import Array, Names
from isobit.compiled.ptx.program import Instruction, Program


class Recorded:
    """The operations of a run."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def add(
        self, operation: str, made: Names, operands: Sequence[Array], instruction: Instruction
    ) -> None:
        """Record results."""

    def add_buffer(self, buffer: Any) -> None:
        """Record the names of an input."""

    def add_tile(self, *parts: Any) -> None:
        """Record a matrix product."""
