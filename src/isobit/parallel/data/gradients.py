"""`Gradients`: the gradient of a global batch, accumulated over micro-batches and ranks.

[Note: how a gradient travels]
The gradient of a parameter is one sum over the samples of the global batch, along a balanced binary
tree (order/samples.py). Every micro-batch on every rank is a share of the samples that is one
subtree of that tree (global_batch.py), so its gradient is the unrounded value of one tree node.

1. `Gradients.micro_batch(i)` opens share i. Operators that are called inside return fp32 partial
   gradients of that share and mark them (ops/share.py).
2. Hooks take each parameter's gradient as autograd delivers it, check the mark (below)
   and push it into the parameter's binary counter (reducer.py). The counter adds two
   partial gradients as soon as they are siblings in the tree, like a carry in binary addition.
3. In the last micro-batch the counter's root is this rank's whole subtree. The roots of all ranks
   are all-reduced in buckets along [Note: the reduction tree over ranks], which is the upper part
   of the same sample tree.
4. One rounding into `p.grad`.

What differs per wrapper is who launches step 3: hooks (reducer.py), DDP's communication hook
(ddp.py), or FSDP2's reduce-scatter, which runs after every micro-batch (fsdp.py). The bits do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.share import Share, Unfinished, collecting, is_partial
from isobit.parallel.collectives.levels import Group, RankGroup, rank_count, rank_in, ranks_of
from isobit.parallel.data.ddp import DdpReducer
from isobit.parallel.data.fsdp import FsdpReducer
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.reducer import GradientReducer, PlainReducer
from isobit.parallel.same_environment import require_same_training
from isobit.parallel.tensor.expert_exchange import exchange_of, mark_exchanges

# Checks of each gradient that autograd delivers to a parameter inside a micro-batch.

ONE_USE = (
    "call each module once per micro-batch: join its inputs into one call, or give each call a "
    "module of its own that shares the weight"
)
OURS = (
    "compute what is trained by isobit's operators (isobit.nn.Linear, isobit.embedding, "
    "isobit.rms_norm, …), without torch.compile; or freeze it by requires_grad_(False)"
)


class GradientChecks:
    """Requires one gradient per parameter and micro-batch, from one isobit operator.

    See [Note: one delivery per parameter] in ops/share.py. A hook on a leaf sees the sum of all
    uses before it becomes `p.grad`.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Register a hook on each of these (name, leaf) pairs."""
        self._share: Share | None = None
        self._delivered: set[int] = set()
        self._leaves = list(named)
        self._hooks = [self._watch(name, leaf) for name, leaf in self._leaves]

    def _watch(self, name: str, leaf: Tensor) -> RemovableHandle:
        check = partial(self._check, name, id(leaf), exchange_of(leaf) is not None)
        hook: RemovableHandle = leaf.register_hook(check)  # type: ignore[no-untyped-call]
        return hook

    def begin(self, share: Share) -> None:
        """Expect one gradient of this share for every parameter.

        Hooks run in the order in which they were registered. Ours is moved behind those that were
        registered later, so that it sees a gradient that another hook has changed.
        """
        self._share = share
        self._delivered.clear()
        for at, (name, leaf) in enumerate(self._leaves):
            if next(reversed(leaf._backward_hooks or {}), None) != self._hooks[at].id:
                self._hooks[at].remove()
                self._hooks[at] = self._watch(name, leaf)

    def end(self) -> None:
        """Stop checking: a backward from here on belongs to the user."""
        self._share = None

    def _check(self, name: str, leaf: int, is_exchanged: bool, grad: Tensor) -> None:
        share = self._share
        if share is None:
            return
        # Experts that are split over ranks have the gradient of the samples of all of these ranks.
        shares = share.groups.values() if is_exchanged else [share]
        if leaf in self._delivered:
            raise UnsupportedError(
                expected="one backward in each micro-batch",
                received=f"a second gradient of {name}",
                remedy="add the losses of a micro-batch, and call backward once",
            )
        if not any(is_partial(grad, each) for each in shares):
            used = any(leaf in each.used for each in shares)
            why = (
                "several calls, a stock operator or another micro-batch added"
                if used
                else "a stock operator led"
            )
            raise UnsupportedError(
                expected="a gradient that one isobit operator computed, of the samples of this "
                "micro-batch",
                received=f"the gradient of {name}, to which {why}",
                remedy=f"{ONE_USE}; {OURS}" if used else OURS,
            )
        self._delivered.add(leaf)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


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
        ...     batch = GlobalBatch(total=4, micro_batches=micro_batches)
        ...     gradients = Gradients(model, batch)
        ...     for micro in range(micro_batches):
        ...         rows = x[batch.samples(0, micro)]
        ...         with gradients.micro_batch(micro) as share:
        ...             lengths = [5] * share.size
        ...             samples = isobit.Samples.packed(lengths, first=share.first, total=share.total)
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
        mark_exchanges(model)
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
    is_wrapped = isinstance(model, DistributedDataParallel | FSDPModule)
    if is_wrapped and any(exchange_of(p) is not None for p in model.parameters()):
        raise UnsupportedError(
            expected="a model without DistributedDataParallel or fully_shard, if its experts are split over ranks",
            received=f"{type(model).__name__}, which would add the gradients of different experts",
            remedy="pass the model itself to Gradients, which adds what each rank has of every other parameter",
        )
    if isinstance(model, DistributedDataParallel):
        return DdpReducer(model, batch, group)
    if isinstance(model, FSDPModule):
        return FsdpReducer(model, batch, group)
    return PlainReducer(model, batch, group)
