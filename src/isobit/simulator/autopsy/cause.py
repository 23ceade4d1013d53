"""The cause of a hang: the calls of all ranks lined up, and explained in the simulator's words."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isobit.errors import ArgumentError, DeadlockError, MismatchError, SimulationError
from isobit.foundation.majority import name_ranks
from isobit.simulator.autopsy.dumps import DEFAULT_GROUP, MOST_RANKS, Dump, Entry, Ranks
from isobit.simulator.checkers.deadlock import deadlock, without_followers
from isobit.simulator.checkers.mismatch import (
    CallSites,
    describe_signature,
    group_mismatches,
    mismatch,
)
from isobit.simulator.collectives import Call, Group, Operation, Signature

# The calls of all ranks, lined up: which ranks met in which collective, and which send belongs to
# which receive.
#
# [Note: lining up]
# The recorder of each rank is a ring buffer: it has the last calls only, and each rank dropped
# others. Nothing is counted from the front of a buffer. A collective is the same on two ranks if
# its group and its number in the group are; torch counts that number from the start of the group. A
# rank that has a later call of the group, but not this one, has dropped it, so it did join.
# Messages have no common number. Of two ranks, the completed sends and receives belong together,
# and those in progress are paired in their order.

GroupName = tuple[str, tuple[int, ...], int]  # name, members, how often the name was used before


MOST_SENTENCES = 4  # calls that ranks wait in; a report has all in its table
MOST_GUESSED = 1 << 12  # ranks that follow from the highest one; a file's name may end in anything


class CalledGroup(Group):
    """A group whose members were not recorded: `members` are the ranks whose dumps have a call of it."""

    def describe(self) -> str:
        """Return the group in words."""
        return f"group {self.name!r} (members not recorded; called by {name_ranks(self.members)})"


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
        world: All ranks of the job, as far as they are known.
        knows_world: Whether they were recorded or stated; gloo does not record them.
        meetings: The collectives, by group and number.
        letters: The sends and receives in progress, by rank.
    """

    def __init__(
        self, dumps: Mapping[int, Dump], others: Iterable[int] = (), size: int | None = None
    ) -> None:
        """Line up the calls; `others` are ranks whose dump cannot be read, `size` is how many the job had."""
        self.dumps = dict(sorted(dumps.items()))
        # By name, what dumps record of its members. Most dumps share one object, which is looked at once.
        recorded: dict[str, dict[int, Ranks]] = {}
        for dump in self.dumps.values():
            for group, ranks in dump.groups.items():
                recorded.setdefault(group, {})[id(ranks)] = ranks
        self._recorded = {group: tuple(found.values()) for group, found in recorded.items()}
        named = (rank for found in self._recorded.values() for ranks in found for rank in ranks)
        found = {*dumps, *named}
        self.knows_world = size is not None or any(dump.world for dump in self.dumps.values())
        if size is not None:
            check_size(size, found)
            found.update(range(size))
        elif not self.knows_world:
            found.update(others)
            highest = max(self.dumps, default=0)
            found.update(range(min(highest, MOST_GUESSED)))  # every rank below another one exists
        self.world = Ranks(sorted(found))
        self.meetings: dict[tuple[GroupName, int], Meeting] = {}
        self.letters: dict[int, list[Letter]] = {rank: [] for rank in self.dumps}
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._callers: dict[str, dict[int, None]] = {}
        self._called: dict[str, Ranks] = {}
        self._guessed: set[tuple[str, int]] = set()  # whose members are known by their calls only
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
        own = self.dumps[rank].groups.get(name, Ranks())
        for members in (own, *self._recorded.get(name, ())):
            if members.has(rank):
                return members
        if entry.desc == DEFAULT_GROUP:  # gloo does not record the members of a group
            return self.world
        self._guessed.add((name, rank))
        if name not in self._called:
            self._called[name] = Ranks(self._callers[name])
        return self._called[name]

    def _add(self, rank: int, entry: Entry) -> None:
        name = self.group_of(rank, entry)
        kind = CalledGroup if (entry.group, rank) in self._guessed else Group
        group = kind(name[0], name[2], name[1], entry.timeout * 1000)
        if entry.p2p:
            members = group.members
            if not entry.done and entry.kind in ("send", "recv"):
                is_named = 0 <= entry.peer < len(members)
                peers = (members[entry.peer],) if is_named else without(members, rank)
                self.letters[rank].append(Letter(group, rank, peers, entry))
            return
        meeting = self.meetings.setdefault((name, entry.number), Meeting(group, entry.number))
        meeting.calls.setdefault(rank, []).append(entry)
        self._latest[name, rank] = max(self._latest.get((name, rank), 0), entry.number)

    def knows_members(self, group: Group) -> bool:
        """Return whether all members of a group are known, and not only those that left a dump."""
        if isinstance(group, CalledGroup):
            return False
        return self.knows_world or group.members != self.world

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


def check_size(size: int, found: Iterable[int]) -> None:
    """Raise ArgumentError if a job of this many ranks does not have the ranks that were found."""
    highest = max(found, default=0)
    if not highest < size <= MOST_RANKS:
        raise ArgumentError(
            expected=f"a number of ranks from {highest + 1}, as the dumps name rank {highest}, to {MOST_RANKS}",
            received=str(size),
            remedy="state how many ranks the job had, or leave it out",
        )


def without(members: Iterable[int], rank: int) -> tuple[int, ...]:
    """Return the other members of a group."""
    return tuple(other for other in members if other != rank)


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


# The cause of a hang, from the calls that ranks recorded, in the simulator's words.

# Sizes may differ between ranks: torch carries these out as broadcasts, or pairs of messages.
UNEVEN = (
    "all_gather",
    "reduce_scatter",
    "all_gather_v",
    "reduce_scatter_v",
    "broadcast_oop",
    "reduce_oop",
)
PAIRWISE = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "alltoall", "alltoall_base")


def find_cause(history: History) -> SimulationError | None:
    """Return why ranks wait, or None if no call is in progress and all calls agree."""
    blocked = blocked_ranks(history)
    found = find_group_mismatch(history) or find_mismatch(history)
    if found is not None or not blocked:
        return found
    waits: Mapping[int, Wait] = blocked
    stuck: SimulationError
    if any(waiting.missing() for waiting in blocked.values()):
        stuck = find_deadlock(history, blocked)
    elif queued := queued_ranks(history, blocked):
        waits, stuck = queued, find_deadlock(history, queued)
    else:
        stuck = all_joined(history, blocked)
    sites = call_sites(history)
    meetings = [wait for wait in waits.values() if isinstance(wait, Meeting)]
    notes = (sites.before(meeting.group.key, meeting.number) for meeting in meetings)
    stuck.note = next(filter(None, notes), "")
    return stuck


def call_sites(history: History) -> CallSites:
    """Return from where ranks made the collectives that all members have recorded."""
    sites = CallSites()
    for meeting in sorted(history.meetings.values(), key=lambda m: m.number):
        if len(meeting.calls) == len(meeting.group.members):
            stacks = {rank: calls[0].stack for rank, calls in meeting.calls.items()}
            sites.note(meeting.group.key, meeting.number, meeting.describe(), stacks)
    return sites


Wait = Meeting | Letter


def in_progress(history: History, rank: int) -> list[tuple[Entry, Wait]]:
    """Return what a rank may be waiting in: of each group its first collective in progress, and all messages."""
    found: list[tuple[Entry, Wait]] = [(a.entry, a) for a in history.letters[rank]]
    first: dict[object, tuple[Entry, Wait]] = {}
    for (name, _), meeting in history.meetings.items():
        entry = next((e for e in meeting.calls.get(rank, ()) if not e.done), None)
        if entry is not None and (name not in first or entry.record < first[name][0].record):
            first[name] = (entry, meeting)
    return sorted([*found, *first.values()], key=lambda pair: pair[0].record)


def blocked_ranks(history: History) -> dict[int, Wait]:
    """Return what each rank waits in: the first call that another rank has not made, else the first in progress."""
    blocked: dict[int, Wait] = {}
    for rank in history.dumps:
        waits = [wait for _, wait in in_progress(history, rank)]
        if waits:
            blocked[rank] = next((wait for wait in waits if wait.missing()), waits[0])
    return blocked


class Queued(Meeting):
    """A collective that every member has called, and some only behind another one that is in progress."""


def queued_ranks(history: History, blocked: Mapping[int, Wait]) -> dict[int, Wait]:
    """Find ranks that called the same collectives in another order: each is in one, with the other behind it."""
    queued: dict[int, Wait] = {}
    made: dict[int, Queued] = {}
    for rank, wait in blocked.items():
        if not isinstance(wait, Meeting):
            continue
        late = [r for r in wait.in_progress() if blocked.get(r, wait) is not wait]
        if late:
            shown = Queued(wait.group, wait.number, wait.calls, absent=tuple(late))
            queued[rank] = made.setdefault(id(wait), shown)
    return queued


def find_deadlock(history: History, blocked: Mapping[int, Wait]) -> SimulationError:
    """Report ranks in calls that other ranks have not joined."""
    waiting = {rank: wait for rank, wait in blocked.items() if wait.missing()}
    left = {rank: "without a dump" for rank in history.world if rank not in history.dumps}
    for rank, dump in history.dumps.items():
        if rank not in blocked:
            left[rank] = "in no call" if dump.entries else "without any recorded call"
    for wait in waiting.values():
        if isinstance(wait, Meeting) and not wait.absent:
            left |= {r: "without records of this group" for r in wait.unknown if r in history.dumps}
    stacks = {rank: stack_of(history, rank, wait) for rank, wait in waiting.items()}
    found = deadlock(waiting, left, stacks, {})
    received = shortened(found, waiting, left)
    remedy, ranks = [found.remedy], list(found.ranks)
    unseen = {rank for those in found.waits.values() for rank in those} - history.dumps.keys()
    if unseen:
        # Ranks without a dump have no vote: they would outvote those that wait for them.
        seen = {rank: words for rank, words in left.items() if rank in history.dumps}
        voted = deadlock(waiting, seen, stacks, {})
        ranks = list(voted.ranks)
        if not set(ranks) <= set(voted.cycle):
            ranks = without_followers(sorted(unseen.union(ranks)), found.waits)
        remedy = advice([r for r in ranks if r not in unseen], [r for r in ranks if r in unseen])
    for rank in [rank for rank in ranks if rank in blocked and rank not in waiting]:
        inside = blocked[rank]
        if unknown := unknown_members(history, inside):
            received.append(f"rank {rank} in {inside.describe()}: {unknown}")
            remedy.append(f"look at the other members of group {inside.group.name!r} too")
    error = DeadlockError(
        expected=found.expected,
        received="; ".join(received),
        remedy="; ".join(remedy),
        ranks=ranks,
        stacks=stacks,
    )
    error.waits, error.cycle = found.waits, found.cycle
    return error


def shortened(
    found: DeadlockError, waiting: Mapping[int, Wait], left: Mapping[int, str]
) -> list[str]:
    """Return which rank waits for which; of many calls, as in a ring of messages, those with most ranks."""
    places: dict[int, list[int]] = {}
    for rank, wait in waiting.items():
        places.setdefault(id(wait), []).append(rank)
    if len(places) <= MOST_SENTENCES:
        return [found.received]
    shown = sorted(places.values(), key=len, reverse=True)[:MOST_SENTENCES]
    named = {rank: waiting[rank] for rank in waiting if any(rank in ranks for ranks in shown)}
    others = name_ranks(waiting.keys() - named.keys())
    said = [
        deadlock(named, left, {}, {}).received,
        f"{others} in {len(places) - len(shown)} other calls that ranks have not joined",
    ]
    if len(found.cycle) > 1:
        first = " → ".join(map(str, found.cycle[:MOST_SENTENCES]))
        said.append(f"a cycle of {len(found.cycle)} ranks: {first} → …")
    return said


def advice(seen: Sequence[int], unseen: Sequence[int]) -> list[str]:
    """Return what to do about the ranks at fault: those with a dump, and those without."""
    found = []
    if seen:
        found.append(
            f"check {name_ranks(seen)} for an extra or missing collective, a different call order or group, or a "
            "missing send"
        )
    if len(unseen) == 1:
        found.append(
            f"collect the dump of {name_ranks(unseen)}, and see whether its process lives and where it is (py-spy dump)"
        )
    elif unseen:
        found.append(
            f"collect the dumps of {name_ranks(unseen)}, and see which of these processes live and where they are "
            "(py-spy dump): not all of them need be at fault"
        )
    return found


def unknown_members(history: History, wait: Wait) -> str:
    """Return that other members of a call's group may not have joined; nothing if all members are known."""
    if history.knows_members(wait.group):
        return ""
    if isinstance(wait.group, CalledGroup):
        return "a member of this group that never called it may be missing"
    return (
        "how many ranks the job had is not recorded: if there were more than these "
        f"{len(history.world)}, a rank without a dump did not join"
    )


def stack_of(history: History, rank: int, wait: Wait) -> list[str]:
    """Return where a rank made the call that it waits in."""
    entry = wait.entry if isinstance(wait, Letter) else wait.calls[rank][0]
    return list(entry.stack)


def all_joined(history: History, blocked: Mapping[int, Wait]) -> DeadlockError:
    """Report a call that every rank joined, with equal arguments, and that did not complete."""
    first = min(blocked, key=lambda rank: (in_progress(history, rank)[0][0].created, rank))
    wait = blocked[first]
    ranks = [rank for rank, other in blocked.items() if other is wait]
    joined = name_ranks(wait.calls) if isinstance(wait, Meeting) else f"rank {first} and its peer"
    unknown, before = unknown_members(history, wait), ""
    if unknown and isinstance(wait.group, CalledGroup):
        before = "see in the program which ranks are members of the group, and where they are; if all have joined, "
    elif unknown:
        before = "state how many ranks the job had (--ranks N), and collect the dumps of all; if all have joined, "
    return DeadlockError(
        expected="a call that every rank joined to complete",
        received=f"{joined} joined {wait.describe()}, with the same kind, sizes and dtype; {name_ranks(ranks)} did "
        f"not complete it{f'; {unknown}' if unknown else ''}",
        remedy=f"{before}compare what the recorder does not store, the root, the reduction and the tag, at these "
        "lines; if they are equal, look at the network and the devices (NCCL_DEBUG=INFO)",
        ranks=sorted(ranks),
        stacks={rank: stack_of(history, rank, wait) for rank in ranks},
    )


def find_group_mismatch(history: History) -> MismatchError | None:
    """Report a group in use that ranks made of different members."""
    used = {m.group.name for m in history.meetings.values() if m.in_progress()}
    made: dict[tuple[str, int], dict[tuple[int, ...], dict[int, str]]] = {}
    for rank, dump in history.dumps.items():
        for name, members in dump.groups.items():
            if name in used and members.has(rank):
                made.setdefault((name, 0), {}).setdefault(members, {})[rank] = ""
    return next(iter(group_mismatches(made)), None)


def find_mismatch(history: History) -> MismatchError | None:
    """Report the first collective, then the first message, whose ranks disagree on what it is."""
    for meeting in sorted(history.meetings.values(), key=lambda m: (m.first.created, m.number)):
        found = disagreement(meeting)
        if found is not None:
            found.note = call_sites(history).before(meeting.group.key, meeting.number)
            return found
    for letters in history.letters.values():
        for letter in letters:
            if letter.other is not None and letter.entry.kind == "send":
                found = letter_mismatch(letter, letter.other)
                if found is not None:
                    return found
    return None


def disagreement(meeting: Meeting) -> MismatchError | None:
    """Report a collective of which two ranks recorded another kind, dtype or number of elements."""
    longest = max(map(len, meeting.calls.values()))
    typed = all(any(e.dtypes) for calls in meeting.calls.values() for e in calls)
    settled = not meeting.in_progress()
    for at in range(longest):
        entries = {rank: calls[at : at + 1] for rank, calls in meeting.calls.items()}
        seen = {rank: compared(found, typed) for rank, found in entries.items()}
        kinds = {found[0].kind if found else "" for found in entries.values()}
        if len(set(seen.values())) < 2 or (settled and kinds <= set(UNEVEN)):
            continue
        shown: dict[object, Signature] = {}
        calls = [
            Call(
                rank,
                "",
                [],
                [],
                site=next(iter(found[0].stack), "") if found else "",
                _signature=shown.setdefault(seen[rank], displayed(found)),
            )
            for rank, found in entries.items()
        ]
        return mismatch(Operation(meeting.group, meeting.number, meeting.first.kind), calls)
    return None


def measured(entry: Entry) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return the shapes and dtypes that must be equal on all ranks."""
    if entry.kind == "scatter":  # only the root has inputs
        return entry.outputs, entry.dtypes[1]
    return entry.inputs, entry.dtypes[0]


def compared(entries: Sequence[Entry], typed: bool) -> object:
    """Return what decides whether two ranks call the same: the number of elements, not the shape."""
    if not entries:
        return None
    shapes, dtypes = measured(entries[0])
    sizes = None if entries[0].kind in PAIRWISE else tuple(map(math.prod, shapes))
    return entries[0].kind, dtypes if typed else (), sizes


def displayed(entries: Sequence[Entry]) -> Signature:
    """Return what a rank called, as the simulator describes it."""
    if not entries:
        return "no further call of this batch", -1, None, (), ()
    shapes, dtypes = measured(entries[0])
    return entries[0].kind, -1, None, dtypes[:1], () if entries[0].kind in PAIRWISE else shapes


def letter_mismatch(letter: Letter, other: Entry) -> MismatchError | None:
    """Report a send and its receive of different sizes or dtypes."""
    sent = letter.entry
    if math.prod(sent.inputs[0] if sent.inputs else ()) == math.prod(
        other.outputs[0] if other.outputs else ()
    ) and (not sent.dtypes[0] or not other.dtypes[1] or sent.dtypes[0] == other.dtypes[1]):
        return None
    sender, receiver = letter.rank, letter.peers[0]
    shown = [
        describe_signature(("", -1, None, dtypes[:1], shapes)).strip()
        for shapes, dtypes in ((sent.inputs, sent.dtypes[0]), (other.outputs, other.dtypes[1]))
    ]
    return MismatchError(
        expected=f"a buffer on rank {receiver} that fits the message of rank {sender}: {shown[0]}",
        received=shown[1],
        remedy="use one size and dtype on both",
        ranks=sorted({sender, receiver}),
        stacks={sender: sent.stack, receiver: other.stack},
    )
