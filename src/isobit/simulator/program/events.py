"""Event loops and `select`: a rank that waits for files or for a time passes the baton while nothing is ready."""

from __future__ import annotations

import select
import selectors
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator.program import waits
from isobit.simulator.program.replaced import replaced
from isobit.simulator.schedule import Schedule

SLICE = 0.001  # seconds between two checks of files that other processes may write to
Plain: Any = selectors.DefaultSelector


class RankSelector(Plain):  # type: ignore[misc]
    """The selector of asyncio's event loops."""

    _wait: tuple[Schedule, int, waits.LocalWait] | None = None

    def select(self, timeout: float | None = None) -> Any:
        """Return the ready files; pass the baton until there are some, or until the time is over."""
        if not ranks.has_baton():
            return super().select(timeout)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            waits.spin(id(self), "an event loop")
            return ready
        if len(self.get_map()) > 1:
            return self._check_files(timeout)
        # Only the pipe of the loop itself, to which threads write to wake it.
        rank, waiting = ranks.current(), waits.LocalWait("an event loop")
        self._wait = rank.schedule, ranks.current_strand(), waiting
        ready = super().select(0)  # a thread without the baton may have written just now
        if not ready:
            waits.wait(waiting, timeout)
        return ready or super().select(0)

    def _check_files(self, timeout: float | None) -> Any:
        """Check again and again in real time, since other processes may write."""
        rank = ranks.current()
        until = None if timeout is None else rank.clock + timeout * 1e6
        ready: Any = []
        while not ready and (until is None or rank.clock < until):
            waits.sleep(SLICE)
            ready = super().select(SLICE)
        return ready

    def ring(self) -> None:
        """Wake the loop."""
        if self._wait is not None:
            schedule, strand, waiting = self._wait
            waits.wake(schedule, strand, waiting)


def write_of(plain: Any) -> Any:
    """Return a replacement for asyncio's `_write_to_self` that also wakes the strand of the loop."""

    def write_to_self(self: Any) -> None:
        plain(self)
        if isinstance(self._selector, RankSelector):
            self._selector.ring()

    return write_to_self


def select_of(plain: Any) -> Any:
    """Return a replacement for `select.select` whose pure sleeps take virtual time."""

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
    """Make event loops of ranks pass the baton."""
    loop: Any = selector_events.BaseSelectorEventLoop
    with (
        replaced(selectors, "DefaultSelector", RankSelector),
        replaced(select, "select", select_of(select.select)),
        replaced(loop, "_write_to_self", write_of(loop._write_to_self)),
    ):
        yield
