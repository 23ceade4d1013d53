"""Planted bugs of buffers under way, of ranks that wait without torch.distributed, and of their threads."""

from __future__ import annotations

import os
import tempfile
import threading
import time

import torch
import torch.distributed as dist

from tests.simulator.bugs.bug import one, planted


def is_guilty(rank: int, seed: int, wrong: bool) -> bool:
    return wrong and (rank,) == one(seed)


@planted("what isend sends is overwritten before wait", "pending")
def overwritten_send(rank: int, seed: int, wrong: bool) -> None:
    """The twin writes the half of the storage that is not sent, and the other half after wait."""
    storage, theirs = torch.ones(16), torch.empty(8)
    work = dist.isend(storage[:8], dst=(rank + 1) % 4)
    storage[0 if is_guilty(rank, seed, wrong) else 8] = 7.0
    dist.recv(theirs, src=(rank - 1) % 4)
    work.wait()
    storage[:8] = 0.0


@planted("what batch_isend_irecv sends is overwritten through numpy", "pending")
def overwritten_batch(rank: int, seed: int, wrong: bool) -> None:
    mine, theirs = torch.ones(8), torch.empty(8)
    batch = [
        dist.P2POp(dist.isend, mine, (rank + 1) % 4),
        dist.P2POp(dist.irecv, theirs, (rank - 1) % 4),
    ]
    works = dist.batch_isend_irecv(batch)
    if is_guilty(rank, seed, wrong):
        mine.numpy()[3] = 7.0
    for work in works:
        work.wait()
    mine.numpy()[3] = 7.0


@planted("the input of an asynchronous all-gather is overwritten before wait", "pending")
def overwritten_input(rank: int, seed: int, wrong: bool) -> None:
    mine, every = torch.ones(4), torch.empty(16)
    work = dist.all_gather_into_tensor(every, mine, async_op=True)
    if is_guilty(rank, seed, wrong):
        mine.zero_()
    work.wait()
    mine.zero_()


@planted("a rank that computes for ever", "rank busy", patience=0.5)
def endless_computation(rank: int, seed: int, wrong: bool) -> None:
    total = 0
    while is_guilty(rank, seed, wrong) or total < 1000:
        total += 1
    dist.all_reduce(torch.ones(1))


@planted("a rank that polls for a file that nobody makes", "deadlock")
def endless_poll(rank: int, seed: int, wrong: bool) -> None:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "ready")
    if (rank,) == one(seed):
        while wrong and not os.path.exists(path):
            time.sleep(1.0)
        with open(path, "w"):
            pass
    while (rank,) == one(seed + 1) and not wrong and not os.path.exists(path):
        time.sleep(1.0)
    dist.barrier()
    if rank == 0 and not wrong:
        os.remove(path)
        os.rmdir(folder[0])


@planted("a collective that one rank's thread skips", "deadlock")
def skipped_in_thread(rank: int, seed: int, wrong: bool) -> None:
    def exchange() -> None:
        if not is_guilty(rank, seed, wrong):
            dist.all_reduce(torch.ones(1))

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()
