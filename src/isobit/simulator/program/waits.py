"""Waits inside a rank: for a lock, a thread, an event or a time, and loops that poll."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from isobit.simulator import rank as ranks
from isobit.simulator.call_sites import called_by_program
from isobit.simulator.schedule import Schedule, Waiting

SPINS = 8  # after this many queries for one thing in one turn, the strand is polling


@dataclass(eq=False)
class LocalWait:
    """A wait inside one rank, or for a lock that a thread of another rank holds.

    Attributes:
        what: The wait in words.
        ranks: The ranks that can end it.
        outside: Whether a thread without the baton may end it.
    """

    what: str
    ranks: list[int] = field(default_factory=lambda: [ranks.current().index])
    outside: bool = True

    def describe(self) -> str:
        """Return the wait in words."""
        return self.what

    def missing(self) -> Iterable[int]:
        """Return the ranks that can end it."""
        return self.ranks


def wait(waiting: Waiting, seconds: float | None = None) -> bool:
    """Pass the baton on until the strand is woken (True) or its time is over (False)."""
    rank = ranks.current()
    rank.check()
    microseconds = None if seconds is None else int(seconds * 1e6)
    woken = rank.schedule.block(ranks.current_strand(), waiting, microseconds)
    rank.check()
    return woken


def wake(schedule: Schedule, strand: int, waiting: Waiting) -> None:
    """End the wait of a strand, from any thread."""

    def act() -> None:
        if schedule.blocked.get(strand) is waiting:
            schedule.wake(strand)

    if ranks.has_baton():
        act()
    else:
        schedule.outside(act)


def sleep(seconds: float) -> None:
    """Let virtual time pass."""
    rank = ranks.current()
    rank.check()
    if not rank.schedule.sleep(ranks.current_strand(), int(seconds * 1e6)):
        give_up(rank, "a loop of time.sleep")
    rank.check()


def poll(what: str) -> None:
    """Pass the baton on, in a loop that asks for `what` again and again."""
    rank = ranks.current()
    rank.check()
    schedule, strand = rank.schedule, ranks.current_strand()
    if not schedule.poll(strand) and not schedule.sleep(strand, 1):
        give_up(rank, f"a loop that asks for {what}")
    rank.check()


def spin(key: object, what: str) -> None:
    """Count the queries for one key in one turn; from the ninth on, each of them is a poll."""
    rank = ranks.current()
    now = rank.schedule.turn, rank.calls
    if rank.asked_in != now:
        # A rank that polled in its last turn and has made no call since is still polling.
        same_loop = rank.asked_in[1] == rank.calls
        rank.asked = {k: SPINS for k, n in rank.asked.items() if n > SPINS and same_loop}
        rank.asked_in = now
    rank.asked[key] = rank.asked.get(key, 0) + 1
    if rank.asked[key] > SPINS and called_by_program(sys._getframe(2)):
        poll(what)


def give_up(rank: ranks.Rank, what: str) -> None:
    """Block for good, since all runnable strands have polled in vain, so that the deadlock is reported."""
    waiting = LocalWait(f"{what}, for what no rank does", rank.others, outside=False)
    rank.schedule.block(ranks.current_strand(), waiting)
