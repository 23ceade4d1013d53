"""`Gradients`: the gradient of a global batch from micro-batches and ranks, with the bits it has in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import ArgumentError
from isobit.ops.share import Share, collecting
from isobit.ops.unfinished import Unfinished
from isobit.parallel.collectives.group import Members
from isobit.parallel.data.batch import GlobalBatch
from isobit.parallel.data.ddp import DdpCarrier
from isobit.parallel.data.fsdp import FsdpCarrier
from isobit.parallel.data.gradient_checks import Deliveries
from isobit.parallel.data.reducer import Carrier, OwnCarrier
from isobit.parallel.same_environment import require_alike_trainers


class Gradients:
    """Collects a step's parameter gradients: micro-batches by a binary counter, ranks by the exchange.

        gradients = Gradients(model, GlobalBatch(of=16, ranks=2, micro_batches=4))
        for micro in range(4):
            with gradients.micro_batch(micro):
                loss_of(model, samples of this share).backward()   # divided by the global count of active tokens
        # now every p.grad is that of the 16 samples in one batch, bit for bit

    `model` is an enabled or isobit model, DistributedDataParallel of one, or one that fully_shard split. Partials are
    fp32 whatever the parameter's dtype, and gradients are dense. A parameter that no micro-batch used has a gradient of
    zeros. Refused: a trained parameter's call without the share's samples, a gradient that a stock operator, several
    calls of a module or several backwards contributed to, and optimizer.step() before the last micro-batch has ended.
    """

    def __init__(
        self, model: nn.Module, batch: GlobalBatch, *, group: dist.ProcessGroup | None = None
    ) -> None:
        self.batch = batch
        if isinstance(model, DistributedDataParallel):
            refuse_other_group(model, group)
            group = model.process_group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        if ranks != batch.ranks:
            raise ArgumentError(
                expected=f"a group of {batch.ranks} ranks, as the batch is cut",
                received=f"{ranks} ranks",
                remedy="pass the data-parallel group, or cut the batch for its ranks",
            )
        if ranks > 1:
            require_alike_trainers(model, batch, Members.of(group))
        self._carrier = carrier_of(model, batch, group)
        self._deliveries = Deliveries(self._carrier.leaves)
        self._unfinished = Unfinished(model.parameters(), batch.micro_batches)
        self._next, self._open, self._closed = 0, False, False

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[Share]:
        """Forward and backward of this rank's `index`-th micro-batch go inside; the last one completes p.grad."""
        if self._closed:
            raise ArgumentError(
                expected="Gradients that are in use",
                received="closed ones",
                remedy="make Gradients anew",
            )
        if index != self._next or self._open:
            raise ArgumentError(
                expected=f"micro-batch {self._next}: they are merged from left to right, one at a time",
                received=f"micro-batch {index}"
                + (f" inside micro-batch {self._next}" if self._open else ""),
                remedy="run micro-batches 0, 1, … of every step; to give a step up, call discard()",
            )
        share, node = self.batch.share(self.rank, index), self.batch.node(self.rank, index)
        last = index == self.batch.micro_batches - 1
        opened = self._carrier.begin(node, last)  # what it refuses leaves all as it was
        self._open = True
        self._unfinished.begin(index)
        self._deliveries.begin(share)
        try:
            with collecting(share), opened:
                yield share
            self._carrier.end(node, last)
            self._next = 0 if last else index + 1
        except BaseException:
            self._give_up()
            raise
        finally:
            self._open = False
            self._deliveries.end()
        if last:
            self._unfinished.end()

    def _give_up(self) -> None:
        self._next = 0
        self._unfinished.end()
        self._carrier.clear()

    def discard(self) -> None:
        """Drops what was collected of this step: the next micro-batch is 0. All ranks call this at the same place."""
        if self._open:
            raise ArgumentError(
                expected="discard() between micro-batches",
                received=f"discard() inside micro-batch {self._next}",
                remedy="raise an exception inside the block: it drops the step as well",
            )
        self._give_up()

    @property
    def peak_bytes(self) -> int:
        """The most memory that partials held at the end of a micro-batch, so far."""
        return self._carrier.peak_bytes

    def close(self) -> None:
        """Takes the hooks off; the model is as it was, and gradients that are whole stay."""
        if not self._closed:
            self._closed = True
            self._unfinished.end()
            self._deliveries.close()
            self._carrier.close()


def refuse_other_group(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> None:
    """The wrapper exchanges over its own."""
    own = dist.get_process_group_ranks(model.process_group)
    if group is not None and dist.get_process_group_ranks(group) != own:
        raise ArgumentError(
            expected=f"the group of DistributedDataParallel, ranks {own}",
            received=f"ranks {dist.get_process_group_ranks(group)}",
            remedy="leave the group out, or wrap the model with process_group=group",
        )


def carrier_of(model: nn.Module, batch: GlobalBatch, group: dist.ProcessGroup | None) -> Carrier:
    """The engine that the model is wrapped in decides."""
    if isinstance(model, DistributedDataParallel):
        return DdpCarrier(model, batch)
    if isinstance(model, FSDPModule):
        return FsdpCarrier(model, batch, group)
    return OwnCarrier(model, batch, group)
