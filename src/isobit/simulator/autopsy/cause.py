"""The cause of a hang, from the calls that ranks recorded, in the simulator's words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from isobit.errors import DeadlockError, MismatchError, SimulationError
from isobit.foundation.majority import name_ranks
from isobit.simulator.autopsy.dumps import Entry
from isobit.simulator.autopsy.history import History, Letter, Meeting
from isobit.simulator.checkers.call_site_history import CallSites
from isobit.simulator.checkers.deadlock import deadlock
from isobit.simulator.checkers.mismatch import describe_signature, group_mismatches, mismatch
from isobit.simulator.collectives import Call, Signature
from isobit.simulator.operations import Operation

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
    return deadlock(waiting, left, stacks, {})


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
    return DeadlockError(
        expected="a call that every rank joined to complete",
        received=f"{joined} joined {wait.describe()}, with the same kind, sizes and dtype; {name_ranks(ranks)} did "
        "not complete it",
        remedy="compare what the recorder does not store, the root, the reduction and the tag, at these lines; if they "
        "are equal, look at the network and the devices (NCCL_DEBUG=INFO)",
        ranks=sorted(ranks),
        stacks={rank: stack_of(history, rank, wait) for rank in ranks},
    )


def find_group_mismatch(history: History) -> MismatchError | None:
    """Report a group in use that ranks made of different members."""
    used = {m.group.name for m in history.meetings.values() if m.in_progress()}
    made: dict[tuple[str, int], dict[tuple[int, ...], dict[int, str]]] = {}
    for rank, dump in history.dumps.items():
        for name, members in dump.groups.items():
            if name in used and rank in members:
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
