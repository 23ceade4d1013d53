"""Races between threads and asynchronous work: the race check, and beside it the open work of the CTA."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isobit.certifying.machine.asynchronous import Asynchronous
from isobit.certifying.machine.mbarriers import Mbarriers
from isobit.certifying.machine.memory import Buffer, Shared
from isobit.certifying.machine.races import NOBODY, Access, Races
from isobit.certifying.names.names import Array
from isobit.certifying.ptx.program import Instruction
from isobit.certifying.running.refusals import RaceError, refuse


class AsynchronousRaces(Races):
    """The race check of a program with asynchronous work; see [Note: order of asynchronous work]."""

    work: Asynchronous
    barriers: Mbarriers | None = None

    def start(self, work: Asynchronous) -> None:
        """Start a CTA with its own open work."""
        self.work, self.barriers = work, None
        self.groups: list[list[tuple[Instruction, Array]]] = [[]]

    def read(self, access: Access) -> None:
        """Check reads."""
        super().read(access)
        if isinstance(access.buffer, Shared):
            pieces = self.pieces(access)
            self.work.touch(access.instruction, pieces, self.mask(access.threads), write=False)

    def write(self, access: Access, unchanged: Callable[[], Array] | None = None) -> None:
        """Check writes."""
        super().write(access, unchanged)
        bulk = access.instruction.opcode.startswith("cp.async.bulk")
        if isinstance(access.buffer, Shared) and not bulk:
            pieces = self.pieces(access)
            self.work.store(access.instruction, pieces, self.mask(access.threads))

    def write_later(self, access: Access) -> None:
        """Check writes of cp.async, which are pending until their group is waited for."""
        super().write_later(access)
        if access.at.size:
            pieces = self.pieces(access)
            self.work.touch(access.instruction, pieces, self.mask(access.threads), write=True)
            self.work.copied[pieces] = access.instruction.index + 1
            self.groups[-1].append((access.instruction, pieces))

    def commit(self) -> None:
        """Close a group of pending writes."""
        super().commit()
        self.groups.append([])

    def wait(self, instruction: Instruction, pending: int) -> None:
        """Finish all groups but the last `pending`: they are now writes that threads made."""
        super().wait(instruction, pending)
        ended = max(len(self.groups) - 1 - pending, 0)
        for group in self.groups[:ended]:
            for copy, pieces in group:
                self.work.copied[pieces] = 0
                self.work.written_by_threads(copy, pieces)
        del self.groups[:ended]

    def barrier(self) -> None:
        """Order all accesses of the CTA before this point."""
        super().barrier()
        self.work.barrier()
        if self.barriers is not None:
            self.barriers.synchronise()

    def forget(self, buffer: Buffer, at: Array, size: int) -> None:
        """Take the wait of all threads for a bulk copy: it orders its writes, without a barrier."""
        log = self.log(buffer)
        log.arrays["write_epoch"][log.index(at, size)] = NOBODY

    def mask(self, threads: Array) -> Array:
        """Return the threads as one bool each."""
        made = np.zeros(self.threads, bool)
        made[threads] = True
        return made

    def pieces(self, access: Access) -> Array:
        """Return the pieces of shared memory; refuse an ordinary access of a live barrier object."""
        if self.barriers is not None and self.barriers.touches(access.at, access.size):
            raise refuse(
                RaceError,
                access.instruction,
                expected="a barrier object to be used by mbarrier instructions only",
                received="another access of its bytes",
                remedy="end the barrier object with mbarrier.inval first",
            )
        return self.work.pieces(access.at, access.size)
