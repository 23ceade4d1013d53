"""One baton for all ranks: a virtual clock per rank, seeded delays, and the earliest strand runs next.

[Note: the baton] A strand is a thread of a rank: its main one, whose number is the rank's, or one that the rank
started. Exactly one strand of the world runs at a time. It passes the baton where it waits for another: in a
collective, in `time.sleep`, for a lock, or when it asks again and again for what has not changed (a poll). Who runs
next is decided by virtual time and the seed, never by the wall clock. The strands of a rank share its clock.
"""

from __future__ import annotations

import heapq
import random
import time
from _thread import allocate_lock  # the plain lock: inside a world, threading's own is replaced
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Protocol

from isobit.simulator.trace import Recorder

COMPUTE, MESSAGE = (
    100,
    1000,
)  # the most microseconds that a stretch of computing, or a message, takes
POLLS = 10_000  # so many fruitless polls of every strand that can run, and nothing will change
FEW_POLLS, ALL_POLLS = 1_000, 200_000  # or so many of each, where there are so many in all
CALM = 64  # once every strand has polled so often, other processes get some real time, and then with every 64th
REAL = time.sleep, time.monotonic  # kept here: inside a world they are replaced
PAUSE, LONGEST = (
    0.002,
    0.5,
)  # seconds of that real time; where other processes run, as long as the sleep, up to this
TICK = 0.25  # seconds between two looks of the watchdog


class Waiting(Protocol):
    """What a strand is blocked on: describes itself, and names the ranks that it waits for."""

    def describe(self) -> str: ...

    def missing(self) -> Iterable[int]: ...


class Schedule:
    """Only the holder of the baton touches this, so nothing here is locked, except for `outside`."""

    def __init__(self, ranks: int, seed: int, delays: bool, recorder: Recorder) -> None:
        self.clocks = [0] * ranks
        self.slowness = [1.0] * ranks
        self.owner = list(range(ranks))  # strand -> rank
        self.strands = [[rank] for rank in range(ranks)]  # rank -> strands
        self.blocked: dict[int, Waiting] = {}
        self.turn = 0  # counts how often the baton was passed
        self.holder = 0  # the strand that has it
        self.on_pass: Callable[[int], None] = lambda rank: None
        self.on_take: Callable[[int], None] = lambda rank: None
        self.on_stuck: Callable[[], None] = lambda: None
        self.foreign: Callable[[], bool] = lambda: (
            False
        )  # whether another thread or process may yet change something
        self.patience = 120.0  # real seconds that are given to such a thread or process
        self._random, self._delays, self._recorder = random.Random(seed), delays, recorder
        self._seed, self._live, self._state_of = seed, ranks, -1
        self._queue: list[tuple[int, float, int, int]] = []  # (at, lot, strand, ticket)
        self._tickets: dict[
            int, int
        ] = {}  # strand -> its valid entry; others in the queue are stale
        self._issued = 0
        self._polls: dict[int, int] = {}  # strand -> fruitless polls since anything happened
        self._busy: set[int] = set()  # strands whose entry is a poll without a sleep
        self._calm_since = 0.0  # real time since which all strands only poll
        self._outside: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._gates = [allocate_lock() for _ in range(ranks)]
        self._home = allocate_lock()
        for gate in (*self._gates, self._home):
            gate.acquire()

    def delay(self) -> int:
        """How long the next message takes."""
        return 1 + int(self._random.random() * MESSAGE) if self._delays else 0

    def compute(self, rank: int) -> None:
        """Charges a rank for what it did since its last call."""
        if self._delays:
            self.clocks[rank] += int((1 + self._random.random() * COMPUTE) * self.slowness[rank])

    def skew(self) -> list[int]:
        """By how many microseconds each rank started late."""
        lots = random.Random(f"skew {self._seed}")
        return [int(lots.random() * 1e6) if self._delays else 0 for _ in self.clocks]

    def run(self, watchdog: Callable[[int, float], bool]) -> bool:
        """Lends the baton and takes it back when every strand has left; False if the watchdog gave them up."""
        for rank in range(len(self._gates)):
            self._push(rank, self.clocks[rank])
        self._gates[self._next()].release()
        return self.rest(watchdog)

    def rest(self, watchdog: Callable[[int, float], bool]) -> bool:
        """Until every strand has left; asks `watchdog(strand, seconds of its turn)` whether to go on waiting."""
        turn, since = self.turn, REAL[1]()
        while not self._home.acquire(timeout=TICK):
            if turn != self.turn:
                turn, since = self.turn, REAL[1]()
            elif not watchdog(self.holder, REAL[1]() - since):
                return False
        return True

    def open(self, rank: int) -> int:
        """Adds a strand to a rank: it runs when the baton comes to it."""
        strand = len(self.owner)
        self.owner.append(rank)
        self.strands[rank].append(strand)
        gate = allocate_lock()
        gate.acquire()
        self._gates.append(gate)
        self._live += 1
        self._push(strand, self.clocks[rank])
        return strand

    def enter(self, strand: int) -> None:
        """Waits for the strand's turn: the first line of its thread."""
        self._gates[strand].acquire()
        rank = self.owner[strand]
        if self._state_of != rank:
            self._state_of = rank
            self.on_take(rank)

    def pause(self, strand: int) -> None:
        """Lets every strand that is earlier on its clock go first."""
        self._polls.clear()
        clock = self.clocks[self.owner[strand]]
        if self._head(clock) < clock:
            self._push(strand, clock)
            self._switch(strand)

    def poll(self, strand: int) -> bool:
        """Passes the baton on, since the strand will ask again; False if no other strand can change the answer."""
        if self._head(-1) < 0:
            return False
        # Polling is fruitless until somebody else has run: skips to the first who does not poll as well.
        entries = [
            (at, other)
            for at, _, other, ticket in self._queue
            if self._tickets.get(other) == ticket
        ]
        head = min(
            [at for at, other in entries if other not in self._busy] or [at for at, _ in entries]
        )
        clock = self.clocks[self.owner[strand]]
        self._busy.add(strand)
        try:
            return self.sleep(strand, max(clock + 1, head) - clock)
        finally:
            self._busy.discard(strand)

    def sleep(self, strand: int, microseconds: int) -> bool:
        """Passes the baton on for a time; False at once if every strand that could run only polls, for ever."""
        if self._hopeless(strand, microseconds):
            return False
        rank = self.owner[strand]
        until = self.clocks[rank] + max(1, microseconds)
        self._push(strand, until)
        self._switch(strand)
        self.clocks[rank] = max(self.clocks[rank], until)
        return True

    def block(self, strand: int, waiting: Waiting, microseconds: int | None = None) -> bool:
        """Returns True once another strand has called `wake`, False once the time is over."""
        until = 0
        if microseconds is None:
            self._polls.clear()
        elif not self._hopeless(strand, microseconds):
            until = self.clocks[self.owner[strand]] + max(1, microseconds)
            self._push(strand, until)
        self.blocked[strand] = waiting
        self._switch(strand)
        if self.blocked.pop(strand, None) is None:
            return True
        self.clocks[self.owner[strand]] = max(self.clocks[self.owner[strand]], until)
        return False

    def wake(self, strand: int, at: int | None = None) -> None:
        """Makes a blocked strand runnable."""
        self._polls.clear()
        self.blocked.pop(strand)
        rank = self.owner[strand]
        self.clocks[rank] = max(self.clocks[rank], self.clocks[rank] if at is None else at)
        self._push(strand, self.clocks[rank])

    def wake_from(self, waiting: Waiting, rank: int, at: int) -> None:
        """Wakes the strands of a rank that are blocked on this."""
        for strand in self.strands[rank]:
            if self.blocked.get(strand) is waiting:
                self.wake(strand, at)

    def outside(self, action: Callable[[], None]) -> None:
        """Called by a thread that never has the baton: whoever has it does this when it passes it on."""
        self._outside.put(action)

    def leave(self, strand: int) -> None:
        """A strand's last line."""
        self._polls.clear()
        rank = self.owner[strand]
        self.strands[rank].remove(strand)
        self._live -= 1
        if self._live:
            self._hand(rank, self._next())
        else:
            self._home.release()

    def _push(self, strand: int, at: int) -> None:
        self._issued += 1
        self._tickets[strand] = self._issued
        heapq.heappush(self._queue, (at, self._random.random(), strand, self._issued))

    def _head(self, nobody: int) -> int:
        """When the earliest strand in the queue runs."""
        while self._queue and self._tickets.get(self._queue[0][2]) != self._queue[0][3]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else nobody

    def _hopeless(self, strand: int, microseconds: int) -> bool:
        """Counts a fruitless poll; True if all that can run have polled so often that none will find a change."""
        count = self._polls[strand] = self._polls.get(strand, 0) + 1
        if count < CALM:
            return False
        others = [self._polls.get(other, 0) for other in self._tickets if other != strand]
        least = min([count, *others])
        if least == CALM:
            self._calm_since = REAL[1]()
        if least >= CALM and self.foreign():
            REAL[0](min(microseconds * 1e-6, LONGEST))  # what is waited for comes in real time
            return REAL[1]() - self._calm_since >= self.patience
        if least >= CALM and count % CALM == 0:
            REAL[0](PAUSE)
        return least >= POLLS or (least >= FEW_POLLS and sum(others) + count >= ALL_POLLS)

    def _next(self) -> int:
        since = 0.0
        while True:
            self._act(0)
            if self._head(-1) >= 0:
                break
            since = since or REAL[1]()
            if self._lock_waits() and self.foreign() and REAL[1]() - since < self.patience:
                self.turn += 1
                self._act(TICK)  # a thread without the baton may yet release a lock
            else:
                self.on_stuck()
        at, _, strand, _ = heapq.heappop(self._queue)
        del self._tickets[strand]
        self.turn += 1
        self.holder = strand
        self._recorder.note(self.owner[strand], at, "run")
        return strand

    def _act(self, timeout: float) -> None:
        """Does what other threads asked for; waits so long for the first of them."""
        try:
            while not self._outside.empty() or timeout:
                self._outside.get(timeout=timeout)()
                timeout = 0
        except Empty:
            pass

    def _lock_waits(self) -> bool:
        return any(getattr(waiting, "outside", False) for waiting in self.blocked.values())

    def _hand(self, rank: int, chosen: int) -> None:
        if self.owner[chosen] != rank:
            self.on_pass(rank)
        self._gates[chosen].release()

    def _switch(self, strand: int) -> None:
        chosen = self._next()
        if chosen != strand:
            self._hand(self.owner[strand], chosen)
            self.enter(strand)
