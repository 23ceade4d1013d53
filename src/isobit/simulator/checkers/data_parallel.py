"""Data-parallel ranks: which ranks are to train on different batches, although no two hold the same parameters.

[Note: who may share a batch]
Shards show nothing about data: FSDP's ranks and tensor-parallel ranks both hold a part of each tensor. The collectives
do. FSDP and DDP reduce gradients over a group: its members are data parallel. Ranks that exchange activations in a
forward pass (tensor, sequence, context or expert parallel) may be given one batch, so they count as one of them. On a
mesh of 2 × 2, data × tensor, FSDP reduces over {0, 2} and {1, 3}, and activations pass within {0, 1} and {2, 3}: ranks
0 and 2 are compared, and so are 1 and 3. Replicas, which start with equal parameters, need no such evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from isobit.simulator.collectives import Call

FSDP = "distributed/fsdp/"
SYNC_BATCH_NORM = (
    "nn/modules/_functions.py"  # statistics of different batches, not activations of one
)
DTENSOR = "distributed/tensor/"
ACTIVATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class DataParallel:
    """The groups of ranks that reduce gradients, and those that exchange activations.

    Attributes:
        reducing: Groups over which FSDP or DDP reduces gradients.
        exchanging: Groups with a collective in a forward pass.
        tensor_parallel: Those of them that DTensor made.
    """

    def __init__(self) -> None:
        """Start without any group."""
        self.reducing: set[tuple[int, ...]] = set()
        self.exchanging: set[tuple[int, ...]] = set()
        self.tensor_parallel: set[tuple[int, ...]] = set()

    def note_call(self, call: Call, in_forward: bool) -> None:
        """Note what a collective shows of its group."""
        if len(call.members) < 2:
            return
        if call.torchs_file.startswith(FSDP):
            if call.kind in ("reduce_scatter", "all_reduce") and not in_forward:
                self.reducing.add(call.members)
        elif in_forward and call.kind in ACTIVATIONS and call.torchs_file != SYNC_BATCH_NORM:
            self.exchanging.add(call.members)
            if call.torchs_file.startswith(DTENSOR):
                self.tensor_parallel.add(call.members)

    def note_module(self, module: nn.Module) -> None:
        """Note the group of DDP, whose C++ code makes its collectives."""
        if isinstance(module, DistributedDataParallel):
            self.reducing.add(tuple(sorted(get_process_group_ranks(module.process_group))))

    def groups(self) -> list[tuple[int, ...]]:
        """Return the largest sets of ranks that are data parallel to each other."""
        return connect({rank for group in self.reducing for rank in group}, self.reducing)


def connect(ranks: Collection[int], groups: Iterable[Collection[int]]) -> list[tuple[int, ...]]:
    """Return the ranks in sets that groups connect.

    Example:
        >>> connect([0, 1, 2, 3, 4], [(0, 1), (1, 2)])
        [(0, 1, 2), (3,), (4,)]
    """
    sets = {rank: {rank} for rank in ranks}
    for group in groups:
        joined = set().union(*(sets[rank] for rank in group if rank in sets))
        sets.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(each)) for each in sets.values()})
