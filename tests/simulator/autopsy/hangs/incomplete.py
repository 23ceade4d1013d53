"""Hangs of which the files are incomplete, or in which every rank joined."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isobit.simulator import Die, Drop
from tests.simulator.autopsy.hangs.collectives import skipped_last, stalled
from tests.simulator.autopsy.hangs.hang import drop_calls, hang, sums, without


def trained(rank: int, planted: bool) -> None:
    """Ranks end at different records: ranks 2 and 3 made calls in a group of their own before."""
    group = dist.new_group([2, 3])
    if rank > 1:
        for _ in range(5):
            dist.all_reduce(torch.ones(2), group=group)
    for step in range(20):
        if not (planted and rank == 1 and step == 19):
            dist.all_reduce(torch.ones(4))


hang(
    "ring buffers that begin at different calls",
    (1,),
    "all_reduce number 20 of group '0'",
    change=drop_calls(lambda rank: 4 + rank),
    name="ring-buffers",
)(trained)
hang(
    "ring buffers that hold two calls",
    (1,),
    "all_reduce number 20 of group '0'",
    change=drop_calls(lambda rank: 2),
    name="short-ring-buffers",
)(trained)
hang(
    "the dump of a rank that waits is lost",
    (2,),
    "all_reduce number 3 of group '0'",
    change=without(0),
    name="lost-dump",
)(skipped_last)
hang(
    "a rank dies and leaves no dump",
    (3,),
    "all_reduce number 3 of group '0'",
    faults=(Die(3, 3),),
    change=without(3),
    name="dead-rank",
)(stalled)
hang(
    "the network loses a rank's data: all joined",
    (0, 1, 2, 3),
    "all_reduce number 2 of group '0'",
    absent=(),
    faults=(Drop(1, 2),),
    name="lost-data",
)(stalled)


@hang("another root on one rank: all joined", (0, 1, 2, 3), "broadcast number 2", absent=())
def other_root(rank: int, planted: bool) -> None:
    sums(1)
    dist.broadcast(torch.ones(4), src=1 if planted and rank == 3 else 0)
