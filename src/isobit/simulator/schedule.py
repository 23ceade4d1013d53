"""The scheduler: one thread runs at a time, chosen by virtual time and the seed.

[Note: one baton]
All ranks run as threads of one process, and exactly one of these threads runs at any time: the one that has the
baton. A *strand* is such a thread: the main thread of a rank, whose number is the rank's, or a thread that the rank
started. The strands of a rank share its virtual clock.

- A strand keeps the baton until it has to wait: in a collective, in `time.sleep`, for a lock, or when it asks again
  and again for something that has not changed (a poll). It then calls `pause`, `block`, `sleep` or `poll` here.
- The runnable strand with the earliest virtual time gets the baton. Ties are broken by a random number of the seed.
  The wall clock never decides, so one seed gives one schedule, and the trace of a run can be replayed.
- A strand that is blocked becomes runnable when another strand calls `wake`. If no strand is runnable, the run is
  stuck: `on_stuck` finds the root cause and wakes every strand with an error.
- The baton is a lock per strand (`_gates`): passing it releases the gate of the next strand, then waits at the own.
  Since only the holder touches the schedule, the network and the ranks, none of them needs a lock.
- A thread that a library started has no baton. It may only leave an action in `outside`, which the next strand that
  passes the baton carries out.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from _thread import allocate_lock  # the plain lock: inside a world, threading's own is replaced
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from blake3 import blake3

from isobit.errors import ReplayError
from isobit.simulator.faults import Fault, fault_from

# The trace of a run: its events, their digest, and where a replay departs from it.

# (rank, virtual microseconds, what); what is "run", a call, "done …", "left" or "fault …".
Event = tuple[int, int, str]


@dataclass
class Trace:
    """The settings of a run and its events, in the order in which they happened.

    Example:
        >>> import torch.distributed as dist
        >>> from isobit.simulator import World, replay
        >>> trace = World(2, seed=1).run(lambda rank: dist.barrier()).trace
        >>> replay(trace, lambda rank: dist.barrier()).digest == trace.digest
        True
    """

    ranks: int
    seed: int
    delays: bool
    faults: tuple[Fault, ...] = ()
    sends: str = "buffered"
    events: list[Event] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The BLAKE3 digest of the events: equal digests mean equal schedules."""
        return blake3(
            "\n".join(f"{rank} {at} {what}" for rank, at, what in self.events).encode()
        ).hexdigest()[:32]

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        kept = {
            **asdict(self),
            "faults": [{"kind": type(fault).__name__, **asdict(fault)} for fault in self.faults],
        }
        Path(path).write_text(json.dumps(kept))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace that `save` wrote."""
        kept: dict[str, Any] = json.loads(Path(path).read_text())
        events = [(int(rank), int(at), str(what)) for rank, at, what in kept.pop("events")]
        faults = tuple(fault_from(words) for words in kept.pop("faults"))
        return cls(**kept, faults=faults, events=events)


class Recorder:
    """Write the trace of a run, and find where it first departs from a recorded one."""

    def __init__(self, trace: Trace, recorded: Trace | None = None) -> None:
        """Record into `trace`, and compare with `recorded` if it is given."""
        self.trace = trace
        self.departure: ReplayError | None = None
        self._events, self._recorded = trace.events, None if recorded is None else recorded.events

    def note(self, rank: int, at: int, what: str) -> None:
        """Append an event and compare it with the recorded one."""
        event = (rank, at, what)
        if self._recorded is not None and self.departure is None:
            place = len(self._events)
            wanted = self._recorded[place] if place < len(self._recorded) else None
            if event != wanted:
                self.departure = departure(place, wanted, event)
        self._events.append(event)

    def finish(self) -> None:
        """Compare the ends: a run that has fewer events than the recorded one departs too."""
        place = len(self._events)
        if self._recorded is not None and self.departure is None and place < len(self._recorded):
            self.departure = departure(place, self._recorded[place], None)


def departure(place: int, wanted: Event | None, event: Event | None) -> ReplayError:
    """Build the error for the first event that differs; None is the end of a trace."""
    shown = [
        ("the end" if e is None else f"rank {e[0]} at {e[1]} µs: {e[2]}") for e in (wanted, event)
    ]
    return ReplayError(
        expected=f"event {place} of the trace: {shown[0]}",
        received=shown[1],
        remedy="run the program that was recorded, with the same arguments and versions",
        ranks=sorted({e[0] for e in (wanted, event) if e is not None}),
    )


COMPUTE = 100  # the longest computation between two calls, in virtual microseconds
MESSAGE = 1000  # the longest delay of a message, in virtual microseconds
# If every runnable strand has polled this often without effect, nothing will change:
POLLS = 10_000
FEW_POLLS, ALL_POLLS = 1_000, 200_000  # or each of them this often, and all together that often
CALM = 64  # from this many polls of each strand on, every 64th gives other processes real time
PAUSE = 0.002  # seconds of that real time
LONGEST = 0.5  # the most, where another process runs and the strand sleeps
TICK = 0.25  # seconds between two calls of the watchdog
real_sleep, real_time = time.sleep, time.monotonic  # saved: both are replaced during a run


class Waiting(Protocol):
    """What a strand is blocked on."""

    def describe(self) -> str:
        """Return the wait in words, for a finding."""

    def missing(self) -> Iterable[int]:
        """Return the ranks that this waits for."""


class Schedule:
    """Virtual clocks, the queue of runnable strands, and the baton (see [Note: one baton]).

    Attributes:
        clocks: Virtual microseconds, by rank.
        slowness: Factor on the computation time of each rank.
        owner: The rank of each strand.
        strands: The live strands of each rank.
        blocked: What each blocked strand waits for.
        turn: How often the baton was passed.
        holder: The strand that has the baton.
        on_pass: Called with a rank before the baton leaves it.
        on_take: Called with a rank after it got the baton.
        on_stuck: Called when no strand is runnable.
        foreign: Returns whether a thread or process outside the schedule may still change something.
        patience: Real seconds to wait for such a thread or process.
    """

    def __init__(self, ranks: int, seed: int, delays: bool, recorder: Recorder) -> None:
        """Set every clock to 0; `run` makes the ranks runnable."""
        self.clocks, self.slowness = [0] * ranks, [1.0] * ranks
        self.owner = list(range(ranks))
        self.strands = [[rank] for rank in range(ranks)]
        self.blocked: dict[int, Waiting] = {}
        self.turn = 0
        self.holder = 0
        self.on_pass: Callable[[int], None] = lambda rank: None
        self.on_take: Callable[[int], None] = lambda rank: None
        self.on_stuck: Callable[[], None] = lambda: None
        self.foreign: Callable[[], bool] = lambda: False
        self.patience = 120.0
        self._random, self._delays, self._recorder = random.Random(seed), delays, recorder
        self._seed, self._live, self._state_of = seed, ranks, -1
        self._queue: list[tuple[int, float, int, int]] = []  # (time, random, strand, ticket)
        self._tickets: dict[int, int] = {}  # strand -> its valid entry; its others are stale
        self._issued = 0
        self._polls: dict[int, int] = {}  # strand -> polls without effect
        self._busy: set[int] = set()  # strands whose entry is a poll without a sleep
        self._calm_since = 0.0  # real time since when all strands only poll
        self._outside: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._gates = [allocate_lock() for _ in range(ranks)]
        self._home = allocate_lock()
        for gate in (*self._gates, self._home):
            gate.acquire()

    def delay(self) -> int:
        """Draw the delay of the next message, in microseconds."""
        return 1 + int(self._random.random() * MESSAGE) if self._delays else 0

    def compute(self, rank: int) -> None:
        """Advance the clock of a rank by a random computation time."""
        if self._delays:
            self.clocks[rank] += int((1 + self._random.random() * COMPUTE) * self.slowness[rank])

    def skew(self) -> list[int]:
        """Draw by how many microseconds each rank started late."""
        drawn = random.Random(f"skew {self._seed}")
        return [int(drawn.random() * 1e6) if self._delays else 0 for _ in self.clocks]

    def run(self, watchdog: Callable[[int, float], bool]) -> bool:
        """Hand out the baton and wait until every strand has left; False if the watchdog gave up."""
        for rank in range(len(self._gates)):
            self._push(rank, self.clocks[rank])
        self._gates[self._next()].release()
        return self.rest(watchdog)

    def rest(self, watchdog: Callable[[int, float], bool]) -> bool:
        """Wait until every strand has left, or until `watchdog(strand, seconds of its turn)` is False."""
        turn, since = self.turn, real_time()
        while not self._home.acquire(timeout=TICK):
            if turn != self.turn:
                turn, since = self.turn, real_time()
            elif not watchdog(self.holder, real_time() - since):
                return False
        return True

    def open(self, rank: int) -> int:
        """Add a runnable strand to a rank and return its number."""
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
        """Wait until the strand gets the baton; its thread calls this first."""
        self._gates[strand].acquire()
        rank = self.owner[strand]
        if self._state_of != rank:
            self._state_of = rank
            self.on_take(rank)

    def pause(self, strand: int) -> None:
        """Let every strand with an earlier clock run first."""
        self._polls.clear()
        clock = self.clocks[self.owner[strand]]
        if self._head(clock) < clock:
            self._push(strand, clock)
            self._switch(strand)

    def poll(self, strand: int) -> bool:
        """Pass the baton on, since the strand will ask again; False if no other strand is runnable."""
        if self._head(-1) < 0:
            return False
        # Another poll is useless until another strand has run: skip to the first that does not poll.
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
        """Pass the baton on for a time; False at once if all runnable strands have polled in vain."""
        if self._hopeless(strand, microseconds):
            return False
        rank = self.owner[strand]
        until = self.clocks[rank] + max(1, microseconds)
        self._push(strand, until)
        self._switch(strand)
        self.clocks[rank] = max(self.clocks[rank], until)
        return True

    def block(self, strand: int, waiting: Waiting, microseconds: int | None = None) -> bool:
        """Block the strand; True once another strand has called `wake`, False after the given time."""
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
        """Make a blocked strand runnable, not before the virtual time `at`."""
        self._polls.clear()
        self.blocked.pop(strand)
        rank = self.owner[strand]
        self.clocks[rank] = max(self.clocks[rank], self.clocks[rank] if at is None else at)
        self._push(strand, self.clocks[rank])

    def wake_from(self, waiting: Waiting, rank: int, at: int) -> None:
        """Wake the strands of a rank that are blocked on `waiting`."""
        for strand in self.strands[rank]:
            if self.blocked.get(strand) is waiting:
                self.wake(strand, at)

    def outside(self, action: Callable[[], None]) -> None:
        """Leave an action for the strand that next passes the baton; called by threads without it."""
        self._outside.put(action)

    def leave(self, strand: int) -> None:
        """Remove a strand and pass the baton on; its thread calls this last."""
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
        """Return the time of the earliest runnable strand, or `nobody` if there is none."""
        while self._queue and self._tickets.get(self._queue[0][2]) != self._queue[0][3]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else nobody

    def _hopeless(self, strand: int, microseconds: int) -> bool:
        """Count a poll; True if all runnable strands have polled so often that nothing will change."""
        count = self._polls[strand] = self._polls.get(strand, 0) + 1
        if count < CALM:
            return False
        others = [self._polls.get(other, 0) for other in self._tickets if other != strand]
        least = min([count, *others])
        if least == CALM:
            self._calm_since = real_time()
        if least >= CALM and self.foreign():
            real_sleep(min(microseconds * 1e-6, LONGEST))  # another process needs real time
            return real_time() - self._calm_since >= self.patience
        if least >= CALM and count % CALM == 0:
            real_sleep(PAUSE)
        return least >= POLLS or (least >= FEW_POLLS and sum(others) + count >= ALL_POLLS)

    def _next(self) -> int:
        since = 0.0
        while True:
            self._act(0)
            if self._head(-1) >= 0:
                break
            since = since or real_time()
            if self._lock_waits() and self.foreign() and real_time() - since < self.patience:
                self.turn += 1
                self._act(TICK)  # a thread without the baton may still release a lock
            else:
                self.on_stuck()
        at, _, strand, _ = heapq.heappop(self._queue)
        del self._tickets[strand]
        self.turn += 1
        self.holder = strand
        self._recorder.note(self.owner[strand], at, "run")
        return strand

    def _act(self, timeout: float) -> None:
        """Carry out the actions of other threads; wait up to `timeout` for the first."""
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
