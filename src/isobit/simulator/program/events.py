"""Event loops and `select` on a rank: what waits for files or a time passes the baton while nothing is ready."""

from __future__ import annotations

import select
import selectors
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program import waits
from isobit.simulator.program.clock import replaced
from isobit.simulator.schedule import Schedule

SLICE = 0.001  # seconds between two looks at files that other threads or processes may write to
Plain: Any = selectors.DefaultSelector


class RankSelector(Plain):  # type: ignore[misc]
    """What asyncio makes its loops of."""

    _wait: tuple[Schedule, int, waits.LocalWait] | None = None

    def select(self, timeout: float | None = None) -> Any:
        if not ranks.has_baton():
            return super().select(timeout)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            waits.spin(id(self), "an event loop")
            return ready
        if len(self.get_map()) > 1:
            return self._look_on(timeout)
        # Only a loop's own pipe, which threads write to when they have something for it.
        self._wait = (
            ranks.current().world.schedule,
            ranks.strand(),
            waits.LocalWait("an event loop"),
        )
        ready = super().select(0)  # a thread without the baton may have written just now
        if not ready:
            waits.wait(self._wait[2], timeout)
        return ready or super().select(0)

    def _look_on(self, timeout: float | None) -> Any:
        """Other processes may write too, in real time."""
        rank = ranks.current()
        clocks = rank.world.schedule.clocks
        until = None if timeout is None else clocks[rank.index] + timeout * 1e6
        ready: Any = []
        while not ready and (until is None or clocks[rank.index] < until):
            waits.sleep(SLICE)
            ready = super().select(SLICE)
        return ready

    def ring(self) -> None:
        """A thread has something for the loop."""
        if self._wait is not None:
            schedule, strand, waiting = self._wait
            waits.wake(schedule, strand, waiting)


def write_of(plain: Any) -> Any:
    def write_to_self(self: Any) -> None:
        plain(self)
        if isinstance(self._selector, RankSelector):
            self._selector.ring()

    return write_to_self


def select_of(plain: Any) -> Any:
    def wait(reading: Any, writing: Any, special: Any, timeout: float | None = None) -> Any:
        if (
            ranks.has_baton()
            and timeout is not None
            and timeout > 0
            and not (reading or writing or special)
        ):
            waits.sleep(timeout)
            return [], [], []
        return plain(reading, writing, special, timeout)

    return wait


@contextmanager
def cooperative_selection() -> Iterator[None]:
    """While it is open, event loops of ranks pass the baton."""
    loop: Any = selector_events.BaseSelectorEventLoop
    with (
        replaced(selectors, "DefaultSelector", RankSelector),
        replaced(select, "select", select_of(select.select)),
        replaced(loop, "_write_to_self", write_of(loop._write_to_self)),
    ):
        yield
