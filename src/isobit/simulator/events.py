"""Event loops and `select` on a rank: what waits for files or a time passes the baton while nothing is ready."""

from __future__ import annotations

import select
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isobit.simulator import rank as ranks
from isobit.simulator import waits
from isobit.simulator.clock import replaced

SLICE = 0.001  # seconds between two looks at files that other threads or processes may write to
Plain: Any = selectors.DefaultSelector


class RankSelector(Plain):  # type: ignore[misc]
    """What asyncio makes its loops of."""

    def select(self, timeout: float | None = None) -> Any:
        if not ranks.has_baton():
            return super().select(timeout)
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            waits.spin(id(self), "an event loop")
            return ready
        lonely = len(self.get_map()) <= 1  # a loop's own pipe, which only threads of the rank write to
        if timeout is not None and lonely and not ranks.current().started:
            waits.sleep(timeout)
            return super().select(0)
        return self._look_on(timeout, lonely)

    def _look_on(self, timeout: float | None, lonely: bool) -> Any:
        rank = ranks.current()
        clocks = rank.world.schedule.clocks
        until = None if timeout is None else clocks[rank.index] + timeout * 1e6
        ready: Any = []
        while not ready and (until is None or clocks[rank.index] < until):
            waits.sleep(SLICE)
            ready = super().select(0 if lonely else SLICE)
        return ready


def select_of(plain: Any) -> Any:
    def wait(reading: Any, writing: Any, special: Any, timeout: float | None = None) -> Any:
        if ranks.has_baton() and timeout is not None and timeout > 0 and not (reading or writing or special):
            waits.sleep(timeout)
            return [], [], []
        return plain(reading, writing, special, timeout)

    return wait


@contextmanager
def cooperative_selection() -> Iterator[None]:
    """While it is open, event loops of ranks pass the baton."""
    with replaced(selectors, "DefaultSelector", RankSelector), replaced(select, "select", select_of(select.select)):
        yield
