"""One baton for all ranks: a virtual clock per rank, seeded delays, and the earliest rank runs next."""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from isobit.simulator.trace import Recorder

COMPUTE, MESSAGE = 100, 1000  # the most microseconds that a stretch of computing, or a message, takes
POLLS = 10_000  # so many polls in a row, with nothing else going on, never end


class Waiting(Protocol):
    """What a rank is blocked on: says so, and names the ranks that it waits for."""

    def describe(self) -> str: ...

    def missing(self) -> Iterable[int]: ...


class Schedule:
    """Exactly one rank thread runs. Only the holder of the baton touches this, so nothing here is locked."""

    def __init__(self, ranks: int, seed: int, delays: bool, recorder: Recorder) -> None:
        self.clocks = [0] * ranks
        self.slowness = [1.0] * ranks
        self.blocked: dict[int, Waiting] = {}
        self.on_pass: Callable[[int], None] = lambda rank: None
        self.on_take: Callable[[int], None] = lambda rank: None
        self.on_stuck: Callable[[], None] = lambda: None
        self._random, self._delays, self._recorder = random.Random(seed), delays, recorder
        self._live, self._polls = ranks, 0
        self._queue: list[tuple[int, float, int]] = []
        self._gates = [threading.Lock() for _ in range(ranks)]
        self._home = threading.Lock()
        for gate in (*self._gates, self._home):
            gate.acquire()

    def delay(self) -> int:
        """How long the next message takes."""
        return 1 + int(self._random.random() * MESSAGE) if self._delays else 0

    def compute(self, rank: int) -> None:
        """Charges a rank for what it did since its last call."""
        if self._delays:
            self.clocks[rank] += int((1 + self._random.random() * COMPUTE) * self.slowness[rank])

    def run(self) -> None:
        """The caller lends the baton and gets it back when every rank has left."""
        for rank in range(len(self._gates)):
            self._push(rank)
        self._gates[self._next()].release()
        self.rest()

    def rest(self) -> None:
        """Until every rank has left."""
        self._home.acquire()

    def enter(self, rank: int) -> None:
        """A rank thread's first line: waits for its turn."""
        self._gates[rank].acquire()
        self.on_take(rank)

    def pause(self, rank: int) -> None:
        """Lets every rank that is earlier on its clock go first."""
        self._polls = 0
        if self._queue and self._queue[0][0] < self.clocks[rank]:
            self._push(rank)
            self._switch(rank)

    def poll(self, rank: int) -> bool:
        """A rank asks and will ask again: True if it may, False if nothing can ever change."""
        self.clocks[rank] += 1
        if not self._queue or self._polls > POLLS:
            return False
        self._polls += 1
        self.clocks[rank] = max(self.clocks[rank], self._queue[0][0])
        self._push(rank)
        self._switch(rank)
        return True

    def block(self, rank: int, waiting: Waiting) -> None:
        """Returns once another rank has called `wake`."""
        self._polls = 0
        self.blocked[rank] = waiting
        self._switch(rank)

    def wake(self, rank: int, at: int | None = None) -> None:
        self.blocked.pop(rank)
        self.clocks[rank] = max(self.clocks[rank], self.clocks[rank] if at is None else at)
        self._push(rank)

    def leave(self, rank: int) -> None:
        """A rank thread's last line."""
        self._polls = 0
        self._live -= 1
        if self._live:
            self._gates[self._next()].release()
        else:
            self._home.release()

    def _push(self, rank: int) -> None:
        heapq.heappush(self._queue, (self.clocks[rank], self._random.random(), rank))

    def _next(self) -> int:
        if not self._queue:
            self.on_stuck()
        at, _, rank = heapq.heappop(self._queue)
        self._recorder.note(rank, at, "run")
        return rank

    def _switch(self, rank: int) -> None:
        chosen = self._next()
        if chosen == rank:
            return
        self.on_pass(rank)
        self._gates[chosen].release()
        self.enter(rank)
