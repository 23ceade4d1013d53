"""Ranks that do not agree: on what a call is, the place that it comes from, their devices, or a tensor's bits."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit import bits
from isobit.errors import DeviceError, DivergenceError, MismatchError
from isobit.foundation.majority import Vote, count_votes, name_ranks
from isobit.simulator.call_sites import user_line
from isobit.simulator.collectives import Call, GroupKey, Message, Operation, Receive
from isobit.simulator.rank import Rank

# Mismatches: ranks that meet in one collective, message or process group and do not agree on what it is.

MOST_SHOWN = 8  # ranks whose calls are spelled out
# (group name, incarnation) -> members -> {rank that made it so: its line}
GroupCalls = Mapping[tuple[str, int], Mapping[tuple[int, ...], Mapping[int, str]]]


def mismatch(operation: Operation, calls: Sequence[Call]) -> MismatchError:
    """Report calls of one collective that differ from those of the majority, or all if there is none."""
    vote = count_votes({call.rank: call.signature() for call in calls})
    by_rank = {call.rank: call for call in calls}
    agreed, suspects = vote.groups[0], vote.suspects
    common = describe_signature(by_rank[vote.reference].signature())
    majority = f": {common} as {name_ranks(agreed)}" if vote.has_majority else ""
    shown = [by_rank[rank] for rank in suspects[:MOST_SHOWN]]
    return MismatchError(
        expected=f"{name_ranks(by_rank)} to agree on call number {operation.number} of group "
        f"{operation.group.name!r}{majority}",
        received="; ".join(f"rank {c.rank}: {describe_signature(c.signature())}" for c in shown),
        remedy="call the same collectives in the same order, with one dtype, shape, root and reduction, on all ranks",
        ranks=suspects,
        stacks={
            rank: [by_rank[rank].site] for rank in (*suspects, agreed[0]) if by_rank[rank].site
        },
    )


def describe_signature(signature: Sequence[Any]) -> str:
    """Return what a rank called in words: kind, root, reduction, dtypes and shapes."""
    kind, root, op, dtypes, shapes = signature
    words = [kind, f"from root {root}" if root >= 0 else "", op or ""]
    words += [", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)]
    words += [", ".join(str(tuple(shape)) for shape in shapes or ())]
    return " ".join(word for word in words if word)


def group_mismatches(group_calls: GroupCalls) -> list[MismatchError]:
    """Report process groups that ranks made of different members.

    Groups without a common member are no mismatch: ranks may make disjoint groups under one name.
    """
    found = []
    for (name, _), made in group_calls.items():
        shared = [m for m in made if any(set(m) & set(other) for other in made if other != m)]
        if not shared:
            continue
        common = max(shared, key=lambda members: len(made[members]))
        makers = sorted((tuple(sorted(made[m])) for m in shared), key=len, reverse=True)
        suspects = Vote(tuple(makers)).suspects
        sites = {rank: site for m in shared for rank, site in made[m].items()}
        found.append(
            MismatchError(
                expected=f"all ranks to make group {name!r} of {name_ranks(common)}",
                received="; ".join(
                    f"{name_ranks(made[m])} of {name_ranks(m)}" for m in shared if m != common
                ),
                remedy="call new_group on all ranks, in the same order and with the same ranks",
                ranks=suspects,
                stacks={rank: [site] for rank, site in sites.items() if rank in suspects and site},
            )
        )
    return found


def buffer_mismatch(operation: Operation, wrong: Sequence[tuple[int, str]]) -> MismatchError:
    """Report output buffers that do not fit the data sent to them.

    Args:
        operation: The collective.
        wrong: (member, misfit in words) for each such buffer.
    """
    ranks = sorted({operation.group.members[member] for member, _ in wrong})
    return MismatchError(
        expected=f"output buffers of {operation.describe()} that fit the data sent to them",
        received=f"on {name_ranks(ranks)}, first {wrong[0][1]}",
        remedy="give each output the size and dtype of the data sent to it (for all-to-all: output_split_sizes)",
        ranks=ranks,
        stacks={
            call.rank: [call.site]
            for call in operation.calls.values()
            if call.rank in ranks and call.site
        },
    )


def check_message(receive: Receive, message: Message) -> None:
    """Raise a MismatchError unless the receiver's buffers have the sizes and dtypes of the message."""
    sent = [(t.numel(), t.dtype) for t in message.tensors]
    taken = [(t.numel(), t.dtype) for t in receive.tensors]
    if sent != taken:
        sender, receiver = message.sender, receive.receiver
        raise MismatchError(
            expected=f"a buffer on rank {receiver} that fits the message of rank {sender}: "
            f"{describe_tensors(message.tensors)}",
            received=describe_tensors(receive.tensors),
            remedy=f"use one size and dtype on both: sent at {message.site}, received at {receive.site}",
            ranks=sorted({sender, receiver}),
            stacks={sender: [message.site], receiver: [receive.site]},
        )


def describe_tensors(tensors: Sequence[Tensor]) -> str:
    """Return the shape and dtype of each tensor in words."""
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


# Call sites: the first collective that ranks reach from different places of the program.
#
# [Note: one call late]
# Ranks meet in a collective by its number in the group. A collective that one rank calls too often,
# or not at all, is paired with the next one of the other ranks. If both have one kind and shape,
# they complete, with wrong data, and the calls of the ranks are shifted from there on; the mismatch
# or the deadlock comes later. The place where the ranks came apart is the first collective that
# they called from different lines. Such a collective may be right, as a broadcast under `if rank ==
# 0: … else: …` is, so it is never a finding of its own: it is a note of one.

Stacks = Mapping[
    int, Sequence[str]
]  # of each rank its frames as `file:line in function`, innermost first
MOST_SITES_SHOWN = 4  # places of one collective that are spelled out


@dataclass(frozen=True)
class Apart:
    """A collective that ranks called from different places."""

    number: int
    call: str
    stacks: Stacks

    def __str__(self) -> str:
        """Return the collective, and the outermost place of each rank that differs."""
        places = differing_places(self.stacks)
        shown = [
            f"{name_ranks(ranks)} at {places[ranks[0]]}"
            for ranks in count_votes(places).groups[:MOST_SITES_SHOWN]
        ]
        return f"{self.call}: {', '.join(shown)}"


def differing_places(stacks: Stacks) -> dict[int, str]:
    """Return, of each rank, the outermost frame that differs between ranks; the innermost of a shorter stack."""
    outward = {rank: tuple(reversed(stack)) for rank, stack in stacks.items() if stack}
    at = 0
    while all(len(stack) > at + 1 for stack in outward.values()) and (
        len({without_folder(stack[at]) for stack in outward.values()}) == 1
    ):
        at += 1
    return {rank: stack[min(at, len(stack) - 1)] for rank, stack in outward.items()}


def without_folder(frame: str) -> str:
    """Return a frame without the folder of its file, which may differ between hosts."""
    return re.split(r"[/\\]", frame)[-1]


class CallSites:
    """Of each group, the first collective whose call sites differ, and the first of those that differ in a row."""

    def __init__(self) -> None:
        """Start without any collective."""
        self._first: dict[GroupKey, Apart] = {}
        self._since: dict[GroupKey, Apart] = {}

    def note(self, group: GroupKey, number: int, call: str, stacks: Stacks) -> None:
        """Note a collective that all members have called. Numbers of a group must increase."""
        held = {tuple(stack) for stack in stacks.values() if stack}
        if len(held) < 2 or len({tuple(map(without_folder, stack)) for stack in held}) < 2:
            self._since.pop(group, None)
            return
        apart = Apart(number, call, stacks)
        self._first.setdefault(group, apart)
        self._since.setdefault(group, apart)

    def before(self, group: GroupKey, number: int) -> str:
        """Return where ranks came apart before a collective, in words, or nothing."""
        first, since = self._first.get(group), self._since.get(group)
        found = list(
            dict.fromkeys(
                str(apart)
                for apart in (first, since)
                if apart is not None and apart.number < number
            )
        )
        if not found:
            return ""
        again = "".join(f"; again from {words}" for words in found[1:])
        return f"ranks call from different lines first in {found[0]}{again}"


# Devices: ranks that use a device that another rank uses too.


def shared_devices(ranks: Sequence[Rank]) -> list[DeviceError]:
    """Report ranks that have put tensors on the device of another rank, if devices are watched.

    The device of a rank is the one of its LOCAL_RANK. A rank that is alone on another device, as in a program that
    numbers devices in its own way, is not reported.
    """
    guests: dict[int, list[str]] = {}
    devices: set[int] = set()
    for device in {index for rank in ranks for index in rank.devices_used}:
        users = [rank for rank in ranks if device in rank.devices_used]
        if len(users) > 1 and "devices" in ranks[0].watch:
            strangers = [rank for rank in users if rank.index != device]
            guests.update({rank.index: rank.devices_used[device] for rank in strangers})
            devices.add(device)
    if not guests:
        return []
    kind = ranks[0].accelerator
    named = ", ".join(f"{kind}:{device}" for device in sorted(devices))
    return [
        DeviceError(
            expected=f"each rank to use its own device, {kind}:LOCAL_RANK",
            received=f"{name_ranks(sorted(guests))} on {named}, which another rank uses",
            remedy="call set_device(LOCAL_RANK) before the first tensor, or make TrainingArguments, Accelerator or "
            "Trainer first, which do; and pass map_location to torch.load",
            ranks=sorted(guests),
            stacks=guests,
        )
    ]


# Divergence: tensors that must have the same bits on all ranks and differ.


def same_on_all_ranks(named: Mapping[str, Tensor] | torch.nn.Module, group: Any = None) -> None:
    """Check that tensors have the same bits on all ranks. Every rank of the group must call this.

    Args:
        named: Tensors by name, or a module, whose state_dict is checked.
        group: The process group; None is the whole world.

    Returns:
        Nothing.

    Raises:
        DivergenceError: If a tensor differs. It names the first such tensor, the ranks outside the largest group
            of equal ranks, and the first index that differs.

    Example:
        >>> import torch
        >>> from isobit.errors import DivergenceError
        >>> from isobit.simulator import World, same_on_all_ranks
        >>> def program(rank):
        ...     same_on_all_ranks({"weight": torch.tensor([1.0, float(rank == 2)])})
        >>> try:
        ...     World(4).run(program)
        ... except DivergenceError as error:
        ...     print(error.ranks, error.received)
        (2,) rank 2 differs from the others, first at index [1]: 0x00000000 against 0x3f800000
    """
    if isinstance(named, torch.nn.Module):
        named = dict(named.state_dict())
    site = user_line(sys._getframe(1))
    mine, here = {name: bits.digest(tensor) for name, tensor in named.items()}, dist.get_rank(group)
    digests: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(digests, mine, group=group)
    for name in sorted({name for theirs in digests for name in theirs}):
        vote = count_votes([theirs.get(name) for theirs in digests])
        if vote.is_unanimous:
            continue
        odd = vote.others
        held: list[Tensor | None] = [None] * len(digests)
        shows = here in (vote.reference, odd[0]) and name in named
        dist.all_gather_object(held, named[name].detach() if shows else None, group=group)
        raise diverged(
            name,
            [_global(group, member) for member in odd],
            held[vote.reference],
            held[odd[0]],
            site if here in odd else "",
        )


def _global(group: Any, member: int) -> int:
    return member if group is None else dist.get_global_rank(group, member)


def diverged(
    name: str, ranks: list[int], common: Tensor | None, odd: Tensor | None, site: str
) -> DivergenceError:
    """Report a tensor that differs; None means that a rank has no tensor of the name."""
    differ = "differs" if len(ranks) == 1 else "differ"
    if common is None or odd is None:
        received = f"no such tensor on {name_ranks(ranks) if odd is None else 'the others'}"
    else:
        found = bits.first_difference(common, odd)
        where = "" if found is None or found.index is None else f" at index {list(found.index)}"
        values = f"{found and found.left} against {found and found.right}"
        received = f"{name_ranks(ranks)} {differ} from the others, first{where}: {values}"
    return DivergenceError(
        expected=f"{name} with the same bits on all ranks",
        received=received,
        remedy=f"look for a step or buffer that {name_ranks(ranks)} did not synchronise, or for flipped bits",
        ranks=ranks,
        stacks={ranks[0]: [site]} if site else None,
    )
