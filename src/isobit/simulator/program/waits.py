"""What a strand waits for besides other ranks' calls: a lock, the end of a thread, or a change that never comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from isobit.simulator import rank as ranks
from isobit.simulator.rank import INSTALLED, PYTHON, Rank

if TYPE_CHECKING:
    from isobit.simulator.schedule import Schedule, Waiting

OURS = os.path.dirname(os.path.dirname(__file__))
IMPORT = "<frozen importlib._bootstrap>"
SPINS = 8  # so many questions of one kind in one turn, and the strand is polling


@dataclass(eq=False)
class LocalWait:
    """A wait inside one rank, or for a lock that another rank's thread holds."""

    what: str
    ranks: list[int] = field(default_factory=lambda: [ranks.current().index])
    outside: bool = True  # a thread without the baton may end it

    def describe(self) -> str:
        return self.what

    def missing(self) -> Iterable[int]:
        return self.ranks


def wait(waiting: Waiting, seconds: float | None = None) -> bool:
    """Passes the baton on until the strand is woken (True), or its time is over (False)."""
    rank = ranks.current()
    rank.world.check(rank)
    woken = rank.world.schedule.block(
        ranks.strand(), waiting, None if seconds is None else int(seconds * 1e6)
    )
    rank.world.check(rank)
    return woken


def wake(schedule: Schedule, strand: int, waiting: Waiting) -> None:
    """Ends a strand's wait, from whichever thread."""

    def act() -> None:
        if schedule.blocked.get(strand) is waiting:
            schedule.wake(strand)

    if ranks.has_baton():
        act()
    else:
        schedule.outside(act)


def sleep(seconds: float) -> None:
    """Lets virtual time pass."""
    rank = ranks.current()
    rank.world.check(rank)
    if not rank.world.schedule.sleep(ranks.strand(), int(seconds * 1e6)):
        give_up(rank, "a loop of time.sleep")
    rank.world.check(rank)


def poll(what: str) -> None:
    """Passes the baton on, in a loop that asks `what` again and again."""
    rank = ranks.current()
    rank.world.check(rank)
    schedule = rank.world.schedule
    if not schedule.poll(ranks.strand()) and not schedule.sleep(ranks.strand(), 1):
        give_up(rank, f"a loop that asks for {what}")
    rank.world.check(rank)


def spin(key: object, what: str) -> None:
    """Counts questions: from the ninth for one key in one turn on, each of them is a poll."""
    rank = ranks.current()
    turn, calls = rank.world.schedule.turn, rank.calls
    if rank.asked_in != (
        turn,
        calls,
    ):  # who polled in its last turn, and has made no call since, still does
        rank.asked = {
            k: SPINS for k, n in rank.asked.items() if n > SPINS and rank.asked_in[1] == calls
        }
        rank.asked_in = (turn, calls)
    rank.asked[key] = rank.asked.get(key, 0) + 1
    if rank.asked[key] > SPINS and is_programs(sys._getframe(2)):
        poll(what)


def is_passing(path: str) -> bool:
    """Whether a file is the simulator's or Python's own, which ask for whoever called them."""
    if path.startswith(OURS) or (path.startswith("<frozen") and path != IMPORT):
        return True
    return path.startswith(PYTHON) and not path.startswith(INSTALLED)


def is_programs(frame: FrameType | None) -> bool:
    """Whether the program itself asks, outside an import: a library may hold a lock that no baton is passed for."""
    while frame is not None and is_passing(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(INSTALLED):
        return False
    while frame is not None:
        if frame.f_code.co_filename == IMPORT:
            return False
        frame = frame.f_back
    return True


def give_up(rank: Rank, what: str) -> None:
    """All that can run has polled for long: the strand waits for good, so that the deadlock is named."""
    others = [other.index for other in rank.world.members if other is not rank]
    rank.world.schedule.block(
        ranks.strand(), LocalWait(f"{what}, for what no rank does", others, outside=False)
    )
