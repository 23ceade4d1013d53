"""Hangs in messages between two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.simulator.autopsy.hangs.hang import hang


@hang("every rank receives before it sends", (0, 1, 2, 3), "recv from rank")
def cyclic_receive(rank: int, planted: bool) -> None:
    theirs = torch.empty(3)
    if planted:
        dist.recv(theirs, src=(rank - 1) % 4)
    work = dist.isend(torch.ones(3), dst=(rank + 1) % 4)
    if not planted:
        dist.recv(theirs, src=(rank - 1) % 4)
    work.wait()


@hang("a message to the wrong rank", (1,), "recv from rank 1 on group '0'")
def wrong_receiver(rank: int, planted: bool) -> None:
    work = dist.isend(torch.ones(3), dst=(rank + (2 if planted and rank == 1 else 1)) % 4)
    dist.recv(torch.empty(3), src=(rank - 1) % 4)
    work.wait()


@hang("two ranks send to each other first", (0, 1), "send to rank", world=2, sends="rendezvous")
def both_send_first(rank: int, planted: bool) -> None:
    x = torch.ones(8)
    if rank == 0 or planted:
        dist.send(x, 1 - rank)
        dist.recv(x, 1 - rank)
    else:
        dist.recv(x, 1 - rank)
        dist.send(x, 1 - rank)


@hang("a message and a buffer of other sizes", (2, 3), "message of rank 2", kind="mismatch")
def short_buffer(rank: int, planted: bool) -> None:
    work = dist.isend(torch.ones(3), dst=(rank + 1) % 4)
    dist.recv(torch.empty(2 if planted and rank == 3 else 3), src=(rank - 1) % 4)
    work.wait()


@hang("a pipeline stage that forgets a micro-batch", (1,), "recv from rank 1 on group '0'")
def pipeline(rank: int, planted: bool) -> None:
    for batch in range(4):
        x = torch.ones(2)
        if rank:
            dist.recv(x, rank - 1)
        if rank < 3 and not (planted and rank == 1 and batch == 2):
            dist.send(x, rank + 1)
