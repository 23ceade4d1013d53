"""Hangs in collectives that some rank does not join."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from isobit.simulator import Stall
from tests.simulator.autopsy.hangs.hang import hang, sums


@hang("one rank skips the last all-reduce", (2,), "all_reduce number 3 of group '0'")
def skipped_last(rank: int, planted: bool) -> None:
    sums(2 if planted and rank == 2 else 3)


@hang(
    "an all-reduce under `if rank == 0`",
    (0,),
    "all_reduce number 3 of group '0'",
    absent=(1, 2, 3),
)
def only_first_rank(rank: int, planted: bool) -> None:
    sums(3 if rank == 0 or not planted else 2)


@hang("one rank has a batch less", (1,), "all_reduce number 7 of group '0'")
def fewer_batches(rank: int, planted: bool) -> None:
    for _ in range(2 if planted and rank == 1 else 3):
        for size in (5, 3, 2):
            dist.all_reduce(torch.ones(size))


@hang("two groups in another order on one rank", (1,), "all_reduce number 1 of group '1'")
def two_groups(rank: int, planted: bool) -> None:
    groups = [dist.new_group(range(4)), dist.new_group(range(4))]
    for group in reversed(groups) if planted and rank == 1 else groups:
        dist.all_reduce(torch.ones(3), group=group)


@hang("a member of a subgroup skips its sum", (3,), "all_reduce number 2 of group '1'")
def skipped_in_subgroup(rank: int, planted: bool) -> None:
    group = dist.new_group([1, 2, 3])
    for step in range(2):
        if rank and not (planted and rank == 3 and step == 1):
            dist.all_reduce(torch.ones(2), group=group)


@hang(
    "a mesh: one rank skips its last data-parallel sum",
    (6,),
    "all_reduce number 2 of group '1'",
    world=8,
)
def mesh(rank: int, planted: bool) -> None:
    """Groups of four (data) and of two (tensor): the hang spreads to ranks that do not share a group with it."""
    data = [dist.new_group(range(first, 8, 2)) for first in range(2)]
    tensor = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
    for step in range(2):
        dist.all_reduce(torch.ones(8), group=tensor[rank // 2])
        if not (planted and rank == 6 and step == 1):
            dist.all_reduce(torch.ones(3), group=data[rank % 2])
    dist.all_reduce(torch.ones(8), group=tensor[rank // 2])


@hang("a rank waits in a barrier of the world", (0,), "all_reduce number 1 of group '1'")
def barrier_of_world(rank: int, planted: bool) -> None:
    group = dist.new_group(range(4))
    if planted and rank == 0:
        dist.barrier()
    dist.all_reduce(torch.ones(2), group=group)
    if not (planted and rank == 0):
        dist.barrier()


@hang("a rank that misses a broadcast of an object", (3,), "broadcast number 3 of group '0'")
def missed_broadcast(rank: int, planted: bool) -> None:
    sums(2)
    if not (planted and rank == 3):
        dist.broadcast_object_list(["configuration"], src=0)


@hang("a rank that misses a gather", (1,), "gather number 2 of group '0'")
def missed_gather(rank: int, planted: bool) -> None:
    sums(1)
    if not (planted and rank == 1):
        slots = [torch.empty(2) for _ in range(4)] if rank == 0 else None
        dist.gather(torch.ones(2), slots)


@hang("a rank that misses an all-to-all", (0,), "all_to_all number 2 of group '0'")
def missed_all_to_all(rank: int, planted: bool) -> None:
    sums(1)
    if not (planted and rank == 0):
        dist.all_to_all_single(torch.empty(4), torch.ones(4))


@hang("a rank that misses a scatter", (2,), "scatter number 1 of group '0'")
def missed_scatter(rank: int, planted: bool) -> None:
    if not (planted and rank == 2):
        dist.scatter(torch.empty(2), [torch.ones(2)] * 4 if rank == 0 else None)


@hang("an error that one rank catches", (1,), "all_reduce number 4 of group '0'")
def caught_error(rank: int, planted: bool) -> None:
    for step in range(4):
        try:
            if planted and rank == 1 and step == 2:
                raise ValueError("a corrupt sample")
            sums(1)
        except ValueError:
            continue


@hang("early stopping by a rank's own loss", (3,), "all_reduce number 3 of group '0'")
def early_stop(rank: int, planted: bool) -> None:
    for step in range(5):
        if planted and rank == 3 and step == 2:
            break
        sums(1)


@hang("a group that one rank does not make", (2,), "all_reduce number 1 of group '2'")
def skipped_new_group(rank: int, planted: bool) -> None:
    if rank != 2 or not planted:
        dist.new_group([0, 1, 3])
    dist.all_reduce(torch.ones(3), group=dist.new_group(range(4)))


@hang("two ranks of eight skip a sum", (2, 5), "all_reduce number 3 of group '0'", world=8)
def two_culprits(rank: int, planted: bool) -> None:
    sums(2 if planted and rank in (2, 5) else 3)


@hang("one rank of 64 skips a sum", (41,), "all_reduce number 5 of group '0'", world=64)
def one_of_many(rank: int, planted: bool) -> None:
    sums(4 if planted and rank == 41 else 5)


@hang(
    "a rank that stalls for good",
    (1,),
    "all_reduce number 3 of group '0'",
    faults=(Stall(1, 3),),
)
def stalled(rank: int, planted: bool) -> None:
    sums(3)


@hang("a DDP model without a backward pass on one rank", (2,), "all_reduce number 7 of group '0'")
def skipped_backward(rank: int, planted: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(2):
        loss = model(torch.ones(2, 4)).sum()
        if not (planted and rank == 2 and step == 1):
            loss.backward()


@hang("a rank that polls for a file", (0,), "all_reduce_barrier number 2 of group '0'")
def polls(rank: int, planted: bool) -> None:
    sums(1)
    while planted and rank == 0:
        time.sleep(1.0)
    dist.barrier()
