"""Finds races: accesses of the same bytes, one a write, that no barrier orders."""

from __future__ import annotations

from isobit.compiled.machine.memory import Buffer, Shared
from isobit.compiled.names import Array
from isobit.compiled.ptx.program import Instruction


class Races:
    """The accesses since the last barriers."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def start_launch(self) -> None:
        """Forget the accesses of an earlier launch."""

    def start_cta(self, shared: Shared) -> None:
        """Start a CTA with its own shared memory."""

    def read(
        self, instruction: Instruction, buffer: Buffer, at: Array, size: int, threads: Array
    ) -> None:
        """Check reads of `size` bytes at offsets by threads."""

    def write(
        self, instruction: Instruction, buffer: Buffer, at: Array, size: int, threads: Array
    ) -> None:
        """Check writes."""

    def write_later(
        self, instruction: Instruction, buffer: Buffer, at: Array, size: int, threads: Array
    ) -> None:
        """Check writes of cp.async, which are pending until their group is waited for."""

    def commit(self) -> None:
        """Close a group of pending writes."""

    def wait(self, instruction: Instruction, pending: int) -> None:
        """Finish all groups but the last `pending`."""

    def barrier(self) -> None:
        """Order all accesses of the CTA before this point."""

    def warp_barrier(self, mask: Array | None) -> None:
        """Order the accesses of each warp before this point."""
