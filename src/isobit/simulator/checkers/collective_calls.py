"""Names what is wrong and who is at its root: deadlock, mismatch, orphans, divergence."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit import bits
from isobit.errors import BusyError, DeadlockError, DivergenceError, MismatchError, OrphanError
from isobit.simulator.rank import user_line

if TYPE_CHECKING:
    from isobit.simulator.collectives import Call
    from isobit.simulator.network import Message, Operation
    from isobit.simulator.rank import Rank
    from isobit.simulator.schedule import Waiting


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0–2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs
    )
    return ("ranks " if words and not words.isdigit() else "rank ") + words


def find_cycle(waits: Mapping[int, Collection[int]]) -> list[int]:
    """A cycle of ranks that wait for each other, if there is one."""
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


def odd_ones(parties: Sequence[Collection[int]]) -> list[int]:
    """Everybody outside the party that more than half of them make; nobody where there is none."""
    everybody = {rank for party in parties for rank in party}
    largest = max(parties, key=len)
    return sorted(everybody - set(largest)) if 2 * len(largest) > len(everybody) else []


def deadlock(
    blocked: Mapping[int, Waiting],
    left: Collection[int],
    stacks: Mapping[int, list[str]],
    lost: Mapping[int, str],
) -> DeadlockError:
    """No rank can go on: who waits for whom, for what, and whose fault it looks."""
    waits = {rank: sorted(waiting.missing()) for rank, waiting in blocked.items()}
    places: dict[int, list[int]] = {}
    for rank, waiting in blocked.items():
        places.setdefault(id(waiting), []).append(rank)
    gone = {rank for missing in waits.values() for rank in missing if rank in left}
    cycle = find_cycle(waits)
    missing = sorted({rank for ranks in waits.values() for rank in ranks})
    parties = [*places.values(), *([gone] if gone else [])]
    roots = sorted(lost) or odd_ones(parties) or cycle or missing
    said = []
    for ranks in places.values():
        waiting = blocked[ranks[0]]
        ended = [rank for rank in waits[ranks[0]] if rank in gone]
        tail = f" ({listed(ended)} already returned)" if ended else ""
        said.append(
            f"{listed(ranks)} in {waiting.describe()}, waiting for {listed(waits[ranks[0]])}{tail}"
        )
    if len(cycle) > 1 and not gone:
        said.append("a cycle: " + " → ".join(str(rank) for rank in (*cycle, cycle[0])))
    error = DeadlockError(
        expected="every call to be met by the ranks that it waits for",
        received="; ".join([*said, *lost.values()]),
        remedy=f"see {listed(roots)}: a call that others skip, another order or group of calls, or a message not sent",
        ranks=sorted(roots),
        stacks=stacks,
    )
    error.waits, error.cycle = waits, cycle
    return error


def endless_turn(rank: int, seconds: float, stack: Sequence[str]) -> BusyError:
    """A rank that keeps the others waiting, in real time, without a call that passes the baton."""
    return BusyError(
        expected=f"rank {rank} to reach a call that lets other ranks run within {seconds:g} s",
        received="it computes, or waits, without a call that the simulator sees",
        remedy=f"see the loop or the call at the place named for rank {rank}: wait there by a collective, time.sleep "
        "or a lock of threading; if the work is only long, give it more time (World(patience=…), --patience)",
        ranks=[rank],
        stacks={rank: stack},
    )


def mismatch(operation: Operation, calls: Collection[Call]) -> MismatchError:
    """Ranks that called something else than most did, as the same collective of a group."""
    votes = Counter(call.signature() for call in calls)
    common, count = votes.most_common(1)[0]
    majority = [call for call in calls if call.signature() == common]
    tie = 2 * count <= len(calls)
    odd = [call for call in calls if tie or call.signature() != common]
    return MismatchError(
        expected=f"{listed(call.rank for call in calls)} to agree on call number {operation.number} of group "
        f"{operation.group.name!r}"
        + ("" if tie else f": {written(common)} as {listed(c.rank for c in majority)}"),
        received="; ".join(f"rank {call.rank}: {written(call.signature())}" for call in odd[:8]),
        remedy="call the same collectives in the same order, with one dtype, shape, root and reduction, on all ranks",
        ranks=sorted(call.rank for call in odd),
        stacks={call.rank: [call.site] for call in (*odd, majority[0]) if call.site},
    )


def disputes(
    votes: Mapping[tuple[str, int], Mapping[tuple[int, ...], Mapping[int, str]]],
) -> list[MismatchError]:
    """Groups of one name that ranks made of different members; groups apart from each other do no harm."""
    found = []
    for (name, _), said in votes.items():
        shared = [m for m in said if any(set(m) & set(other) for other in said if other != m)]
        if not shared:
            continue
        common = max(shared, key=lambda members: len(said[members]))
        odd = odd_ones([list(said[members]) for members in shared]) or [
            r for members in shared for r in said[members]
        ]
        heard = "; ".join(f"{listed(said[m])} of {listed(m)}" for m in shared if m != common)
        found.append(
            MismatchError(
                expected=f"all ranks to make group {name!r} of {listed(common)}",
                received=heard,
                remedy="call new_group on all ranks, in the same order and with the same ranks",
                ranks=sorted(odd),
                stacks={
                    rank: [site]
                    for m in shared
                    for rank, site in said[m].items()
                    if rank in odd and site
                },
            )
        )
    return found


def written(signature: Sequence[Any]) -> str:
    kind, root, op, dtypes, shapes = signature
    words = [kind, f"from root {root}" if root >= 0 else "", op or ""]
    words += [", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)]
    words += [", ".join(str(tuple(shape)) for shape in shapes or ())]
    return " ".join(word for word in words if word)


def misfit(operation: Operation, wrong: Sequence[tuple[int, str]]) -> MismatchError:
    """Buffers that cannot take what their rank is sent."""
    ranks = sorted({operation.group.members[member] for member, _ in wrong})
    return MismatchError(
        expected=f"buffers that fit what {operation.describe()} brings",
        received=f"on {listed(ranks)}, first {wrong[0][1]}",
        remedy="give each output the size and dtype of what is sent to it (for all-to-all: output_split_sizes)",
        ranks=ranks,
        stacks={
            call.rank: [call.site]
            for call in operation.calls.values()
            if call.rank in ranks and call.site
        },
    )


def orphaned_work(members: Iterable[Rank]) -> list[OrphanError]:
    """What ranks started and never waited for, told once per line of the program."""
    found: dict[str, list[tuple[int, str]]] = {}
    for rank in members:
        for work in rank.pending.values():
            if (
                work.torchs_own
            ):  # DDP's Join drops the handles of its own signals, whose results nobody reads
                continue
            found.setdefault(work.site, []).append((rank.index, work.what))
    return [
        OrphanError(
            expected=f"{listed({rank for rank, _ in held})} to wait for what they start ({held[0][1]})",
            received=f"the end of the program, {len(held)} handles unwaited; their results were never written",
            remedy="keep the handle that the call returns and call .wait() before using the result",
            ranks=sorted({rank for rank, _ in held}),
            stacks={rank: [site] for rank, _ in held[:1]},
        )
        for site, held in found.items()
    ]


def orphaned_message(message: Message) -> OrphanError:
    return OrphanError(
        expected=f"rank {message.receiver} to receive what rank {message.sender} sent it",
        received="the end of the program, the message unread",
        remedy="match every send with a receive of the same group, source and tag",
        ranks=sorted({message.sender, message.receiver}),
        stacks={message.sender: [message.site]},
    )


def same_on_all_ranks(named: Mapping[str, Tensor] | torch.nn.Module, group: Any = None) -> None:
    """Called on every rank: DivergenceError names the tensor, the ranks that part from the rest, and where first."""
    if isinstance(named, torch.nn.Module):
        named = dict(named.state_dict())
    site = user_line(sys._getframe(1))
    mine = {name: bits.digest(tensor) for name, tensor in named.items()}
    said: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(said, mine, group=group)
    for name in sorted({name for theirs in said for name in theirs}):
        votes = Counter(theirs.get(name) for theirs in said)
        if len(votes) == 1:
            continue
        common = votes.most_common(1)[0][0]
        odd = [member for member, theirs in enumerate(said) if theirs.get(name) != common]
        held: list[Tensor | None] = [None] * len(said)
        keep = said[dist.get_rank(group)].get(name) == common and dist.get_rank(group) not in odd
        first = next(member for member, theirs in enumerate(said) if theirs.get(name) == common)
        shows = dist.get_rank(group) in (first, odd[0]) and name in named
        dist.all_gather_object(held, named[name].detach() if shows else None, group=group)
        raise diverged(
            name,
            [_global(group, m) for m in odd],
            held[first],
            held[odd[0]],
            site if not keep else "",
        )


def _global(group: Any, member: int) -> int:
    return member if group is None else dist.get_global_rank(group, member)


def diverged(
    name: str, ranks: list[int], common: Tensor | None, odd: Tensor | None, site: str
) -> DivergenceError:
    if common is None or odd is None:
        received = f"none on {listed(ranks) if odd is None else 'the others'}"
    else:
        part = bits.first_difference(common, odd)
        where = "" if part is None or part.index is None else f" at index {list(part.index)}"
        values = f"{part and part.left} against {part and part.right}"
        received = f"{listed(ranks)} apart from the rest, first{where}: {values}"
    return DivergenceError(
        expected=f"{name} with the same bits on all ranks",
        received=received,
        remedy=f"see what {listed(ranks)} did to {name} alone: a step or buffer not synchronised, or bits flipped",
        ranks=ranks,
        stacks={ranks[0]: [site]} if site else None,
    )
