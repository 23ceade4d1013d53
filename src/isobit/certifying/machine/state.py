"""The state of the machine, as opcodes see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from isobit.certifying.machine.asynchronous import Asynchronous
from isobit.certifying.machine.memory_access import MemoryAccess
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Operand
from isobit.certifying.running.refusals import (
    DataAddressError,
    DivergentBranchError,
    refuse,
    unknown,
)


class State(MemoryAccess):
    """Registers, memory and what an instruction may require of the threads that execute it."""

    engine: str
    approximate: set[str]  # opcodes whose bits are not those of the hardware
    state: dict[str, Any]  # of opcodes that keep state within a CTA
    steps: list[Callable[[Any, Array | None], None]]  # what runs each instruction
    register_only: list[bool]
    hits: list[int]  # how often each instruction was executed
    meeting_points: dict[int, int]  # where the two sides of each branch meet
    asynchronous: Asynchronous | None
    step_limit: int = 1_000_000  # instructions of one CTA: a loop that goes on is refused

    def concrete(self, operand: Operand) -> Array:
        """Return a 32-bit operand that must not depend on float data."""
        if self.tainted(operand):
            raise refuse(
                DataAddressError,
                self.current,
                expected="a size, lane or count that does not depend on float data",
                received=f"operand {getattr(operand, 'name', operand)}",
                remedy="compute it from integers",
            )
        return self.bits(operand, 32)

    def everyone(self, mask: Array | None) -> None:
        """Refuse an instruction of the whole CTA that some threads do not execute."""
        if mask is not None and not mask.all():
            raise refuse(
                DivergentBranchError,
                self.current,
                expected="all threads of the CTA",
                received=f"{int(mask.sum())} of {self.threads} threads",
                remedy="move the barrier out of the branch",
            )

    def whole_warps(self, mask: Array | None) -> None:
        """Refuse an instruction of a warp that some of its threads do not execute."""
        if (
            mask is not None
            and not (mask.reshape(-1, 32).any(1) == mask.reshape(-1, 32).all(1)).all()
        ):
            raise refuse(
                DivergentBranchError,
                self.current,
                expected="all threads of a warp",
                received="some of them",
                remedy="move the instruction out of the branch",
            )

    def full_warp(self, operand: Operand) -> None:
        """Refuse a mask of members that leaves threads out."""
        if (self.concrete(operand) != np.uint32(0xFFFFFFFF)).any():
            raise unknown(self.current, "member mask of")
