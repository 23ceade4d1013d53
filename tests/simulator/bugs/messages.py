"""Planted bugs of messages between two ranks, in a ring."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.simulator.bugs.bug import all_four, one, planted


def ring(rank: int, *, tag: int = 7, hop: int = 1, receive_first: bool = False) -> torch.Tensor:
    """Each rank sends to the next and receives from the one before."""
    ranks = dist.get_world_size()
    mine, theirs = torch.randn(3), torch.empty(3)
    if receive_first:
        dist.recv(theirs, src=(rank - 1) % ranks, tag=7)
    work = dist.isend(mine, dst=(rank + hop) % ranks, tag=tag)
    if not receive_first:
        dist.recv(theirs, src=(rank - 1) % ranks, tag=7)
    work.wait()
    return theirs


@planted("every rank receives before it sends", "deadlock", all_four)
def cyclic_receive(rank: int, seed: int, wrong: bool) -> None:
    ring(rank, receive_first=wrong)


@planted("a message under a tag that nobody waits for", "deadlock")
def wrong_tag(rank: int, seed: int, wrong: bool) -> None:
    ring(rank, tag=8 if wrong and (rank,) == one(seed) else 7)


@planted("a message to the wrong rank", "deadlock")
def wrong_receiver(rank: int, seed: int, wrong: bool) -> None:
    ring(rank, hop=2 if wrong and (rank,) == one(seed) else 1)


@planted("a send that nobody waits for", "orphan")
def orphaned_send(rank: int, seed: int, wrong: bool) -> None:
    for step in range(3):
        mine, theirs = torch.randn(3), torch.empty(3)
        work = dist.isend(mine, dst=(rank + 1) % 4)
        dist.recv(theirs, src=(rank - 1) % 4)
        if not (wrong and (rank,) == one(seed) and step == seed % 3):
            work.wait()


def sender_and_receiver(seed: int) -> tuple[int, ...]:
    """Nobody can tell which of the two forgot."""
    return tuple(sorted((seed % 4, (seed + 1) % 4)))


@planted("a message that nobody receives", "orphan", sender_and_receiver)
def unread_message(rank: int, seed: int, wrong: bool) -> None:
    ring(rank)
    if wrong and (rank,) == one(seed):
        dist.send(torch.randn(3), dst=(rank + 1) % 4)


@planted("a buffer of another size than the message", "mismatch", sender_and_receiver)
def short_buffer(rank: int, seed: int, wrong: bool) -> None:
    work = dist.isend(torch.randn(3), dst=(rank + 1) % 4)
    dist.recv(torch.empty(2 if wrong and rank == (seed + 1) % 4 else 3), src=(rank - 1) % 4)
    work.wait()
