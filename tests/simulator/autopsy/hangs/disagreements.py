"""Hangs in collectives on which ranks disagree."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.simulator.autopsy.hangs.hang import hang, sums


@hang("a barrier in one branch", (2,), "call number 3 of group '0'", kind="mismatch")
def barrier_in_branch(rank: int, planted: bool) -> None:
    sums(2)
    if planted and rank == 2:
        dist.barrier()
    sums(2)


@hang("another number of elements on one rank", (3,), "call number 2 of group '0'", kind="mismatch")
def other_size(rank: int, planted: bool) -> None:
    sums(1)
    sums(2, 5 if planted and rank == 3 else 4)


@hang("another dtype on one rank", (0,), "call number 2 of group '0'", kind="mismatch")
def other_dtype(rank: int, planted: bool) -> None:
    sums(1)
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if planted and rank == 0 else None))


@hang("an all-gather where others all-reduce", (2,), "call number 2 of group '0'", kind="mismatch")
def other_kind(rank: int, planted: bool) -> None:
    sums(1)
    if planted and rank == 2:
        dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))
    else:
        sums(1)


@hang(
    "a reduce-scatter where others all-gather", (1,), "call number 1 of group '0'", kind="mismatch"
)
def scatter_for_gather(rank: int, planted: bool) -> None:
    if planted and rank == 1:
        dist.reduce_scatter(torch.empty(4), [torch.ones(4)] * 4)
    else:
        dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))


@hang("a checkpoint that only rank 0 gathers", (0,), "call number 3 of group '0'", kind="mismatch")
def checkpoint(rank: int, planted: bool) -> None:
    sums(2)
    if rank == 0 or not planted:
        dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))
    sums(1)


@hang("a gradient bucket that one rank skips", (3,), "call number 2 of group '0'", kind="mismatch")
def skipped_bucket(rank: int, planted: bool) -> None:
    for size in (5, 3, 2):
        if not (planted and rank == 3 and size == 3):
            dist.all_reduce(torch.ones(size))
