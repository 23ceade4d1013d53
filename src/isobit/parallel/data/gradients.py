"""`Gradients`: the gradient of a global batch, accumulated over micro-batches and ranks.

[Note: how a gradient travels]
The gradient of a parameter is one sum over the samples of the global batch, along a balanced binary
tree (order/samples.py). Every micro-batch on every rank is a share of the samples that is one
subtree of that tree (global_batch.py), so its gradient is the unrounded value of one tree node.

1. `Gradients.micro_batch(i)` opens share i. Operators that are called inside return fp32 partial
   gradients of that share and mark them (ops/share.py).
2. Hooks take each parameter's gradient as autograd delivers it, check the mark (gradient_checks.py)
   and push it into the parameter's binary counter (partial_gradients.py). The counter adds two
   partial gradients as soon as they are siblings in the tree, like a carry in binary addition.
3. In the last micro-batch the counter's root is this rank's whole subtree. The roots of all ranks
   are all-reduced in buckets along [Note: the reduction tree over ranks], which is the upper part
   of the same sample tree.
4. One rounding into `p.grad`.

What differs per wrapper is who launches step 3: hooks (plain_reducer.py), DDP's communication hook
(ddp.py), or FSDP2's reduce-scatter, which runs after every micro-batch (fsdp.py). The bits do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import ArgumentError
from isobit.ops.share import Share, Unfinished, collecting
from isobit.parallel.collectives.levels import Group, rank_count, rank_in, ranks_of
from isobit.parallel.collectives.rank_group import RankGroup
from isobit.parallel.data.ddp import DdpReducer
from isobit.parallel.data.fsdp import FsdpReducer
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradient_checks import GradientChecks
from isobit.parallel.data.plain_reducer import PlainReducer
from isobit.parallel.data.reducer import GradientReducer
from isobit.parallel.same_environment import require_same_training


class Gradients:
    """Compute `p.grad` of a global batch, with the bits it has in one batch on one rank.

    Divide the loss of each micro-batch by the global count of active tokens: gradients are summed.
    Partial gradients are fp32 for 16-bit parameters. A parameter without any gradient gets zeros.

    Not supported, and detected: a call of a trained parameter's operator without the samples of the
    share; a gradient to which a stock operator, several calls of one module or several backwards
    contributed; `optimizer.step()` before the last micro-batch has ended.

    Args:
        model: A model of isobit's operators or an enabled model; `DistributedDataParallel` of one;
            or one to which `fully_shard` (FSDP2) was applied.
        batch: How the global batch is divided over ranks and micro-batches.
        group: The data-parallel process group, or its `Levels`; None is the default group, or that of
            the DDP model.

    Raises:
        ArgumentError: The group does not have as many ranks as the batch.
        AgreementError: Ranks differ in version, leaf arithmetic, parameters or batch.
        UnsupportedError: The wrapper has an option that changes how gradients are reduced.

    Example:
        Four samples in two micro-batches have the gradient of one batch, bit for bit.

        >>> import torch
        >>> import isobit
        >>> from isobit.parallel import GlobalBatch, Gradients
        >>> x = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(0))
        >>> def gradient(micro_batches):
        ...     torch.manual_seed(0)
        ...     model = isobit.nn.Linear(32, 32)
        ...     batch = GlobalBatch(of=4, micro_batches=micro_batches)
        ...     gradients = Gradients(model, batch)
        ...     for micro in range(micro_batches):
        ...         rows = x[batch.samples(0, micro)]
        ...         with gradients.micro_batch(micro) as share:
        ...             lengths = [5] * share.size
        ...             samples = isobit.Samples.packed(lengths, first=share.first, of=share.of)
        ...             loss = model(rows.flatten(0, 1), samples=samples).square().sum() / 20
        ...             loss.backward()
        ...     return model.weight.grad
        >>> isobit.bits.equal(gradient(2), gradient(1))
        True
    """

    def __init__(self, model: nn.Module, batch: GlobalBatch, *, group: Group = None) -> None:
        """Compare the ranks and register hooks on the model."""
        self.batch = batch
        if isinstance(model, DistributedDataParallel):
            check_ddp_group(model, group)
            group = model.process_group if group is None else group
        self.rank = rank_in(group) if dist.is_initialized() else 0
        ranks = rank_count(group) if dist.is_initialized() else 1
        if ranks != batch.ranks:
            raise ArgumentError(
                expected=f"a group of {batch.ranks} ranks, as the batch is cut",
                received=f"{ranks} ranks",
                remedy="pass the data-parallel group, or a GlobalBatch with the ranks of the group",
            )
        if ranks > 1:
            require_same_training(model, batch, RankGroup.of(group))
        self._reducer = reducer_for(model, batch, group)
        self._checks = GradientChecks(self._reducer.leaves)
        self._unfinished = Unfinished(model.parameters(), batch.micro_batches)
        self._next, self._open, self._closed = 0, False, False

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[Share]:
        """Open micro-batch `index` of this rank; run its forward and backward inside.

        After the last micro-batch of the step every `p.grad` is complete. An exception inside the
        block drops the step.

        Args:
            index: 0, 1, … in every step.

        Yields:
            The share: `first` (index of its first sample in the global batch), `of` and `size`.

        Raises:
            ArgumentError: The index is not the next one, or another micro-batch is open.
            UnsupportedError: The block had no backward, or a gradient has another source than one
                isobit operator.
        """
        self._check_next(index)
        share, node = self.batch.share(self.rank, index), self.batch.node(self.rank, index)
        last = index == self.batch.micro_batches - 1
        opened = self._reducer.begin(node, last)  # if this raises, nothing has changed yet
        self._open = True
        self._unfinished.begin(index)
        self._checks.begin(share)
        try:
            with collecting(share), opened:
                yield share
            self._reducer.end(node, last)
            self._next = 0 if last else index + 1
        except BaseException:
            self._drop_step()
            raise
        finally:
            self._open = False
            self._checks.end()
        if last:
            self._unfinished.end()

    def _check_next(self, index: int) -> None:
        if self._closed:
            raise ArgumentError(
                expected="Gradients that are in use",
                received="closed ones",
                remedy="make a new Gradients",
            )
        if index != self._next or self._open:
            inside = f" inside micro-batch {self._next}" if self._open else ""
            raise ArgumentError(
                expected=f"micro-batch {self._next}: they run from left to right, one at a time",
                received=f"micro-batch {index}{inside}",
                remedy="run micro-batches 0, 1, … of every step; to abandon a step, call discard()",
            )

    def _drop_step(self) -> None:
        self._next = 0
        self._unfinished.end()
        self._reducer.clear()

    def discard(self) -> None:
        """Abandon this step: the next micro-batch is 0. All ranks must call this at the same place.

        Raises:
            ArgumentError: A micro-batch is open.
        """
        if self._open:
            raise ArgumentError(
                expected="discard() between micro-batches",
                received=f"discard() inside micro-batch {self._next}",
                remedy="raise an exception inside the block: it drops the step as well",
            )
        self._drop_step()

    @property
    def peak_bytes(self) -> int:
        """The largest memory of partial gradients at the end of any micro-batch so far."""
        return self._reducer.peak_bytes

    def close(self) -> None:
        """Remove the hooks from the model; complete gradients stay."""
        if not self._closed:
            self._closed = True
            self._unfinished.end()
            self._checks.close()
            self._reducer.close()


def check_ddp_group(model: DistributedDataParallel, group: Group) -> None:
    """Require that `group` has the ranks over which the DDP model reduces.

    Raises:
        ArgumentError: It has other ranks.
    """
    own = dist.get_process_group_ranks(model.process_group)
    if group is not None and ranks_of(group) != own:
        raise ArgumentError(
            expected=f"the group of DistributedDataParallel, ranks {own}",
            received=f"ranks {ranks_of(group)}",
            remedy="leave the group out, or wrap the model with process_group=group",
        )


def reducer_for(model: nn.Module, batch: GlobalBatch, group: Group) -> GradientReducer:
    """Return the reducer for the way in which the model is wrapped."""
    if isinstance(model, DistributedDataParallel):
        return DdpReducer(model, batch, group)
    if isinstance(model, FSDPModule):
        return FsdpReducer(model, batch, group)
    return PlainReducer(model, batch, group)
