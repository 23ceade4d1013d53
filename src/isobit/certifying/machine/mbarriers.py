"""Barrier objects in shared memory (mbarrier): phases, arrivals, and bytes that are still to come.

[Note: when an asynchronous operation ends]
The machine performs asynchronous work when it is issued, and lets it end as late as it may: an arrival that
such work will make waits in `coming`. A thread that waits for the phase makes it happen. So a wait that is
missing leaves work that never ended, which later accesses run into; and a wait that nothing can complete is
refused. A wait that would be answered differently if the work ended early is refused too: on a GPU its answer
would depend on time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Fail = Callable[[str], Exception]  # Takes what was received, and returns the error to raise.


@dataclass
class Arrival:
    """What asynchronous work will do to a barrier: one arrival, or bytes; and the work that it ends."""

    count: int
    bytes: int
    ends: int  # Work with this number, and (for tcgen05) all work before it in the same pipe.
    pipe: str


@dataclass
class Mbarrier:
    """One barrier object: `count` arrivals complete a phase."""

    count: int
    missing: int
    fail: Fail
    phase: int = 0
    bytes: int = 0  # Bytes that were announced and have not come.
    coming: list[Arrival] = field(default_factory=list)
    ended: list[Arrival] = field(default_factory=list)

    def arrive(self, count: int, announced: int = 0) -> None:
        """Count arrivals now, and bytes that will come."""
        self.bytes += announced
        self.missing -= count
        if self.missing < 0:
            raise self.fail("more arrivals than the phase of a barrier takes")
        self._turn()

    def _turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def wait(self, parity: int) -> list[Arrival]:
        """Let the phase of this parity end, and return the work that a thread now knows to be done."""
        if self.phase % 2 != parity:  # The phase before this one has the parity: it ended already.
            if self.phase_if_early() != self.phase:
                raise self.fail("a wait that is answered yes or no by when asynchronous work ends")
            return list(self.ended)
        goal = self.phase + 1
        while self.phase < goal and self.coming:
            arrival = self.coming.pop(0)
            self.ended.append(arrival)
            self.bytes -= arrival.bytes
            self.missing -= arrival.count
            self._turn()
        if self.phase < goal:
            raise self.fail(f"a wait for phase {self.phase} that nobody completes")
        if self.phase_if_early() != self.phase:
            raise self.fail("a barrier whose next phase may end before this wait is answered")
        return list(self.ended)

    def phase_if_early(self) -> int:
        """Return the phase that the barrier is in when all asynchronous work has ended."""
        phase, missing, announced = self.phase, self.missing, self.bytes
        for arrival in self.coming:
            missing, announced = missing - arrival.count, announced - arrival.bytes
            if missing == 0 and announced == 0:
                phase, missing = phase + 1, self.count
        return phase


class Mbarriers:
    """The barrier objects of one CTA, by address."""

    def __init__(self, fail: Fail) -> None:
        self.fail = fail
        self.live: dict[int, Mbarrier] = {}
        # Until the next bar.sync: the thread that made a barrier object, and those that waited for it.
        self.fresh: dict[int, int] = {}
        self.waited: dict[int, set[int]] = {}

    def init(self, address: int, count: int, thread: int) -> None:
        """Make a barrier object."""
        if address % 8 or count < 1:
            raise self.fail(f"mbarrier.init of count {count} at {address:#x}")
        if address in self.live:
            raise self.fail(f"mbarrier.init at {address:#x}, where a barrier object is alive")
        self.live[address] = Mbarrier(count, count, self.fail)
        self.fresh[address] = thread

    def invalidate(self, address: int, thread: int) -> None:
        """End a barrier object, so that its memory may be used for something else."""
        if self.get(address, thread).coming:
            raise self.fail(
                f"mbarrier.inval at {address:#x} while asynchronous work will arrive there"
            )
        if self.waited.get(address, set()) - {thread}:
            raise self.fail(
                f"mbarrier.inval at {address:#x} without bar.sync after other threads waited"
            )
        del self.live[address]
        self.fresh.pop(address, None)

    def synchronise(self) -> None:
        """Take a bar.sync of all threads."""
        self.fresh.clear()
        self.waited.clear()

    def get(self, address: int, thread: int) -> Mbarrier:
        """Return the barrier object at an address, for a thread that uses it."""
        if address not in self.live:
            raise self.fail(f"a barrier object at {address:#x} that was not initialised")
        if self.fresh.get(address, thread) != thread:
            raise self.fail(
                f"a barrier object at {address:#x} that another thread made, without bar.sync"
            )
        return self.live[address]

    def touches(self, addresses: npt.NDArray[np.int64], size: int) -> bool:
        """Whether accesses of memory touch a live barrier object."""
        return any(
            bool(((addresses < each + 8) & (addresses + size > each)).any()) for each in self.live
        )
