"""Mismatches: ranks that meet in one collective, message or process group and do not agree on what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from isobit.errors import MismatchError
from isobit.foundation.majority import Vote, count_votes, name_ranks
from isobit.simulator.collectives import Call
from isobit.simulator.operations import Message, Operation, Receive

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
