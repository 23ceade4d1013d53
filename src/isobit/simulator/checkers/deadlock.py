"""Deadlocks: ranks that wait for each other, for a rank that has returned, or for one that never stops computing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from isobit.errors import BusyError, DeadlockError, OrphanError
from isobit.foundation.majority import Vote, name_ranks
from isobit.simulator.collectives import Message
from isobit.simulator.rank import Rank
from isobit.simulator.schedule import Waiting


def find_cycle(waits: Mapping[int, Collection[int]]) -> list[int]:
    """Return ranks that wait for each other in a cycle, or nothing if there is no cycle."""
    clear: set[int] = set()
    for start in sorted(waits):
        path, seen, at = [start], {start: 0}, start
        while at not in clear:
            onward = [rank for rank in waits.get(at, ()) if rank in waits]
            if not onward:
                break
            at = min(onward)
            if at in seen:
                return path[seen[at] :]
            seen[at] = len(path)
            path.append(at)
        clear |= set(path)
    return []


def deadlock(
    blocked: Mapping[int, Waiting],
    left: Mapping[int, str],
    stacks: Mapping[int, list[str]],
    lost: Mapping[int, str],
) -> DeadlockError:
    """Report that no rank can continue: which rank waits for which, in which call, and the likely culprits.

    The culprits are the ranks whose message was lost; or those outside the majority, where most ranks wait in one
    call; or the ranks of a cycle; or the ranks that are waited for. Of these, a rank that only waits for another of
    them is left out.

    Args:
        blocked: What each blocked rank waits for.
        left: Why a rank is in no call, in words such as "already returned".
        stacks: The stack of each rank.
        lost: By rank, a sentence about a message that was lost.
    """
    waits = {rank: sorted(waiting.missing()) for rank, waiting in blocked.items()}
    places: dict[int, list[int]] = {}
    for rank, waiting in blocked.items():
        places.setdefault(id(waiting), []).append(rank)
    gone = {rank for missing in waits.values() for rank in missing if rank in left}
    cycle = find_cycle(waits)
    missing = sorted({rank for ranks in waits.values() for rank in ranks})
    parties = [*places.values(), *([gone] if gone else [])]
    vote = Vote(tuple(sorted((tuple(sorted(p)) for p in parties), key=len, reverse=True)))
    outside: Sequence[int] = vote.others if vote.has_majority else ()
    outside = fewer_culprits(outside, places.values(), waits)
    roots = sorted(lost) or without_followers(sorted(outside), waits) or cycle
    roots = roots or without_followers(missing, waits)
    sentences = []
    for ranks in places.values():
        ended: dict[str, list[int]] = {}
        for rank in waits[ranks[0]]:
            if rank in gone:
                ended.setdefault(left[rank], []).append(rank)
        why = ", ".join(f"{name_ranks(those)} {words}" for words, those in ended.items())
        tail = f" ({why})" if why else ""
        call = blocked[ranks[0]].describe()
        awaited = name_ranks(waits[ranks[0]])
        sentences.append(f"{name_ranks(ranks)} in {call}, waiting for {awaited}{tail}")
    if len(cycle) > 1 and not gone:
        sentences.append("a cycle: " + " → ".join(str(rank) for rank in (*cycle, cycle[0])))
    error = DeadlockError(
        expected="the awaited ranks to join every call",
        received="; ".join([*sentences, *lost.values()]),
        remedy=f"check {name_ranks(roots)} for an extra or missing collective, a different call order or group, or a "
        "missing send",
        ranks=sorted(roots),
        stacks=stacks,
    )
    error.waits, error.cycle = waits, cycle
    return error


def fewer_culprits(
    outside: Sequence[int], places: Iterable[Sequence[int]], waits: Mapping[int, Sequence[int]]
) -> Sequence[int]:
    """Return the ranks that most members of a subgroup wait for, if they and those members block each other.

    Ranks 4, 5 and 7 wait for rank 6 in a collective of ranks 4–7; rank 6 has skipped it, and waits with all other ranks
    in one of ranks 0–7. By the majority of all ranks, 4, 5 and 7 would be wrong; one wrong rank explains it too.
    """
    found = outside
    for joined in places:
        missing = waits[joined[0]]
        is_majority = len(joined) > len(missing) and set(joined) <= set(outside)
        is_mutual = all(rank in waits and set(waits[rank]) <= set(joined) for rank in missing)
        if is_majority and is_mutual and 0 < len(missing) < len(found):
            found = missing
    return found


def without_followers(ranks: Sequence[int], waits: Mapping[int, Collection[int]]) -> list[int]:
    """Leave out ranks that wait for others of these; keep all if every one does."""
    first = [rank for rank in ranks if not set(waits.get(rank, ())) & set(ranks)]
    return first or list(ranks)


def endless_lines(rank: int, lines: int, stack: Sequence[str]) -> BusyError:
    """Report a rank that runs too many lines without letting others run."""
    return BusyError(
        expected=f"rank {rank} to reach a call that lets other ranks run within {lines} lines of the program",
        received="more lines than that",
        remedy=f"look at the line given for rank {rank}; if the work just takes long, allow more lines "
        "(World(lines=…), --lines)",
        ranks=[rank],
        stacks={rank: stack},
    )


def endless_turn(rank: int, seconds: float, stack: Sequence[str]) -> BusyError:
    """Report a rank that keeps the baton for too long in real time."""
    return BusyError(
        expected=f"rank {rank} to reach a call that lets other ranks run within {seconds:g} s",
        received="it computes, or waits, without a call that the simulator sees",
        remedy=f"look at the line given for rank {rank}; wait by a collective, time.sleep or a lock of threading; "
        "if the work just takes long, allow more time (World(patience=…), --patience)",
        ranks=[rank],
        stacks={rank: stack},
    )


# Orphans: handles that no rank waited for, and messages that no rank received.


def orphaned_work(ranks: Iterable[Rank]) -> list[OrphanError]:
    """Report handles that were never waited for, once per line of the program."""
    found: dict[str, list[tuple[int, str]]] = {}
    for rank in ranks:
        for work in rank.pending.values():
            if not work.torchs_own:  # DDP's Join never waits for its own signals
                found.setdefault(work.site, []).append((rank.index, work.what))
    errors = []
    for site, held in found.items():
        guilty = sorted({rank for rank, _ in held})
        errors.append(
            OrphanError(
                expected=f"{name_ranks(guilty)} to call wait() on every handle ({held[0][1]})",
                received=f"the end of the program without wait() on {len(held)} handles; their results were never "
                "written",
                remedy="keep the handle that the call returns and call .wait() before using the result",
                ranks=guilty,
                stacks={held[0][0]: [site]},
            )
        )
    return errors


def orphaned_message(message: Message) -> OrphanError:
    """Report a message that was never received."""
    return OrphanError(
        expected=f"rank {message.receiver} to receive the message of rank {message.sender}",
        received="the end of the program without that receive",
        remedy="match every send with a receive of the same group, source and tag",
        ranks=sorted({message.sender, message.receiver}),
        stacks={message.sender: [message.site]},
    )
