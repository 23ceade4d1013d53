"""The calls of all ranks, lined up: which ranks met in which collective, and which send belongs to which receive.

[Note: lining up]
The recorder of each rank is a ring buffer: it has the last calls only, and each rank dropped others. Nothing is counted
from the front of a buffer. A collective is the same on two ranks if its group and its number in the group are; torch
counts that number from the start of the group. A rank that has a later call of the group, but not this one, has dropped
it, so it did join. Messages have no common number. Of two ranks, the completed sends and receives belong together, and
those in progress are paired in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from isobit.simulator.autopsy.dumps import Dump, Entry
from isobit.simulator.operations import Group

GroupName = tuple[str, tuple[int, ...], int]  # name, members, how often the name was used before


@dataclass(eq=False)
class Meeting:
    """One collective: the calls of the ranks that recorded it, and who else is a member.

    Attributes:
        calls: By rank, its calls: several if they were coalesced.
        absent: Members whose dump shows that they did not call it.
        unknown: Members without a dump, or whose buffer has dropped every call of the group.
    """

    group: Group
    number: int
    calls: dict[int, list[Entry]] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()

    @property
    def first(self) -> Entry:
        """A call of the lowest rank."""
        return self.calls[min(self.calls)][0]

    def describe(self) -> str:
        """Return the collective in the simulator's words."""
        return f"{self.first.kind} number {self.number} of {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        """Return the ranks that did not join; if there are none, those that may not have."""
        return self.absent or self.unknown

    def in_progress(self) -> list[int]:
        """Return the ranks that called it and have not completed it."""
        return [rank for rank, calls in self.calls.items() if not all(e.done for e in calls)]


@dataclass(eq=False)
class Letter:
    """A send or a receive in progress; `other` is the call of the peer that belongs to it, if there is one."""

    group: Group
    rank: int
    peers: tuple[int, ...]
    entry: Entry
    other: Entry | None = None

    def describe(self) -> str:
        """Return the call in the simulator's words."""
        peer = f"rank {self.peers[0]}" if len(self.peers) == 1 else "any rank"
        toward = "to" if self.entry.kind == "send" else "from"
        return f"{self.entry.kind} {toward} {peer} on {self.group.describe()}"

    def missing(self) -> Iterable[int]:
        """Return the ranks that would have to send or receive."""
        return () if self.other is not None else self.peers


class History:
    """The calls of all ranks.

    Attributes:
        dumps: The dump of each rank that has one.
        world: All ranks that any dump or file names.
        meetings: The collectives, by group and number.
        letters: The sends and receives in progress, by rank.
    """

    def __init__(self, dumps: Mapping[int, Dump], others: Iterable[int] = ()) -> None:
        """Line up the calls; `others` are ranks whose dump cannot be read."""
        self.dumps = dict(sorted(dumps.items()))
        named = (rank for dump in dumps.values() for r in dump.groups.values() for rank in r)
        self.world = tuple(sorted({*dumps, *others, *named}))
        self.meetings: dict[tuple[GroupName, int], Meeting] = {}
        self.letters: dict[int, list[Letter]] = {rank: [] for rank in self.dumps}
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._callers: dict[str, dict[int, None]] = {}
        self._ages: dict[int, dict[tuple[str, int], int]] = {}
        self._latest: dict[tuple[GroupName, int], int] = {}
        whole = not any(dump.dropped for dump in dumps.values())
        for rank, dump in self.dumps.items():
            self._ages[rank] = incarnations(dump.entries, whole)
            settle_batches(dump.entries)
            for entry in dump.entries:
                self._callers.setdefault(entry.group, {})[rank] = None
        for rank, dump in self.dumps.items():
            for entry in dump.entries:
                self._add(rank, entry)
        for (name, number), meeting in self.meetings.items():
            self._find_missing(name, number, meeting)
        self._pair()

    def group_of(self, rank: int, entry: Entry) -> GroupName:
        """Return the identity of a call's group."""
        key = (entry.group, rank)
        if key not in self._members:
            self._members[key] = self._find_members(rank, entry)
        return entry.group, self._members[key], self._ages[rank][entry.group, entry.group_id]

    def _find_members(self, rank: int, entry: Entry) -> tuple[int, ...]:
        """Return the members of a group: as recorded, or every rank, or the ranks that called it."""
        name = entry.group
        own = self.dumps[rank].groups.get(name, ())
        for members in (own, *(dump.groups.get(name, ()) for dump in self.dumps.values())):
            if rank in members:
                return members
        if entry.desc == "default_pg":  # gloo does not record the members of a group
            return self.world
        return tuple(self._callers[name])

    def _add(self, rank: int, entry: Entry) -> None:
        name = self.group_of(rank, entry)
        group = Group(name[0], name[2], name[1], entry.timeout * 1000)
        if entry.p2p:
            members = group.members
            if not entry.done and entry.kind in ("send", "recv"):
                peers = tuple(r for r in members if r != rank)
                if 0 <= entry.peer < len(members):
                    peers = (members[entry.peer],)
                self.letters[rank].append(Letter(group, rank, peers, entry))
            return
        meeting = self.meetings.setdefault((name, entry.number), Meeting(group, entry.number))
        meeting.calls.setdefault(rank, []).append(entry)
        self._latest[name, rank] = max(self._latest.get((name, rank), 0), entry.number)

    def _find_missing(self, name: GroupName, number: int, meeting: Meeting) -> None:
        absent, unknown = [], []
        for rank in meeting.group.members:
            if rank in meeting.calls:
                continue
            dump, latest = self.dumps.get(rank), self._latest.get((name, rank))
            if dump is None or (latest is None and dump.dropped):
                unknown.append(rank)
            elif latest is None or latest < number:
                absent.append(rank)
        meeting.absent, meeting.unknown = tuple(absent), tuple(unknown)

    def _pair(self) -> None:
        """Give each send in progress the receive in progress that it belongs to."""
        everyone = [letter for letters in self.letters.values() for letter in letters]
        posted: dict[object, deque[Letter]] = {}
        for letter in everyone:
            if letter.entry.kind == "recv":
                source = letter.peers[0] if letter.entry.peer >= 0 else None
                posted.setdefault((letter.group.key, letter.rank, source), deque()).append(letter)
        for letter in everyone:
            if letter.entry.kind == "send":
                to = (letter.group.key, letter.peers[0])
                waiting = posted.get((*to, letter.rank)) or posted.get((*to, None))
                if waiting:
                    other = waiting.popleft()
                    letter.other, other.other = other.entry, letter.entry


def incarnations(entries: Iterable[Entry], whole: bool) -> dict[tuple[str, int], int]:
    """Return the age of each group of a name: counted from the first, or from the last if calls were dropped."""
    made: dict[str, dict[int, None]] = {}
    for entry in entries:
        made.setdefault(entry.group, {})[entry.group_id] = None
    return {
        (name, number): at if whole else at - len(numbers) + 1
        for name, numbers in made.items()
        for at, number in enumerate(numbers)
    }


def settle_batches(entries: Iterable[Entry]) -> None:
    """Give the calls of a batch the state of its last entry: torch only updates that one."""
    batches: dict[tuple[int, bool, int], list[Entry]] = {}
    for entry in entries:
        batches.setdefault((entry.group_id, entry.p2p, entry.number), []).append(entry)
    for batch in batches.values():
        if len(batch) > 1 and batch[-1].kind == "coalesced":
            for entry in batch[:-1]:
                entry.done, entry.state = batch[-1].done, batch[-1].state
