"""The gradient reducer of a DistributedDataParallel model.

DDP keeps its buckets and its overlap with the backward; its communication hook all-reduces our
unrounded partial gradients instead of DDP's buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import UnsupportedError
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Node
from isobit.parallel.collectives.levels import Group
from isobit.parallel.collectives.tree_collectives import all_reduce, all_reduce_rounded
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.reducer import (
    PartialGradients,
    check_any_gradient,
    check_not_distributed,
    check_not_tied,
    check_rank_order,
    check_same_parameters,
    expect_partial_gradients,
    own_gradient,
    register_hooks,
    restore_grad_dtype,
    trained_parameters,
)


class DdpReducer:
    """Accumulates micro-batches under `no_sync()`; the last one is reduced by DDP's hook."""

    def __init__(self, model: DistributedDataParallel, batch: GlobalBatch, group: Group) -> None:
        """Check the wrapper and register hooks, among them DDP's communication hook."""
        check_not_tied(model)
        check_rank_order(batch)
        check_not_distributed(model)
        check_options(model)
        self._model, self._batch, self._group = model, batch, group
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._partials = PartialGradients(self._parameters)
        self._roots: dict[Tensor, Tensor] = {}  # this rank's unrounded gradient, by parameter
        self._current: tuple[Node, bool] | None = None  # (node, last) of the open micro-batch
        model.register_comm_hook(self, reduce_bucket)  # possible once per model; DDP keeps it
        self._hooks = register_hooks(self._take, self._parameters)

    @property
    def peak_bytes(self) -> int:
        """See `GradientReducer.peak_bytes`."""
        return self._partials.peak_bytes

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The parameters of the wrapped module."""
        return trained_parameters(self._model.module)

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Open a micro-batch, under `no_sync()` unless it is the last one."""
        check_same_parameters(self._model.module, self._parameters)
        expect_partial_gradients(self._parameters, self._batch)
        self._current = node, last
        return nullcontext() if last else self._model.no_sync()

    def _take(self, parameter: Tensor) -> None:
        """Run before DDP's own hook, which copies `p.grad` into its bucket."""
        if self._current is None:
            return
        node, last = self._current
        value, parameter.grad = own_gradient(parameter), None
        self._partials.push(parameter, node, value)
        if last:
            root = self._partials.take(parameter, node.ancestor(self._batch.micro_batches))
            self._roots[parameter] = root
            parameter.grad_dtype = parameter.dtype
            parameter.grad = root.to(parameter.dtype)

    def reduce(self, parameters: list[Tensor], buffer: Tensor) -> torch.futures.Future[Tensor]:
        """All-reduce the partial gradients of a bucket, and round them once into DDP's buffer.

        Args:
            parameters: The parameters of the bucket.
            buffer: DDP's buffer. # [sum of the parameters' numel]

        Raises:
            UnsupportedError: The backward is not inside `Gradients.micro_batch`.
        """
        if self._current is None:
            raise UnsupportedError(
                expected="a backward inside Gradients.micro_batch",
                received="a backward of its own",
                remedy="run it under model.no_sync(), or make a new DistributedDataParallel",
            )
        roots = [self._roots.pop(p) for p in parameters]
        flat = torch.cat([root.reshape(-1).to(accumulation_dtype(root.dtype)) for root in roots])
        if flat.dtype != buffer.dtype:
            return all_reduce_rounded(flat, buffer, self._group).get_future()
        work = all_reduce(flat, self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: buffer.copy_(flat))

    def end(self, node: Node, last: bool) -> None:
        """Close a micro-batch; after the last one DDP has written every `p.grad`."""
        self._current = None
        absent = self._partials.complete(node)
        check_any_gradient(absent, self._parameters)
        if last and absent:
            raise UnsupportedError(
                expected="a gradient of every parameter in the last micro-batch: DDP does not "
                "reduce a bucket without it",
                received=f"none for {len(absent)} of {len(self._parameters)}",
                remedy="pass the model itself to Gradients: absent gradients are zeros there",
            )

    def clear(self) -> None:
        """Drop everything of this step, also in DDP's own reducer."""
        self._current = None
        self._partials.clear()
        self._roots.clear()
        for parameter in self._parameters:
            parameter.grad = None
        restore_grad_dtype(self._parameters)
        # Otherwise DDP takes the gradients of the next micro-batch for those of the failed one.
        self._model.reducer._reset_state()

    def close(self) -> None:
        """Remove our hooks. DDP keeps its communication hook, so a later backward raises."""
        for hook in self._hooks:
            hook.remove()
        self._partials.clear()
        restore_grad_dtype(self._parameters)


def reduce_bucket(reducer: DdpReducer, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket: the communication hook that DDP calls."""
    return reducer.reduce(bucket.parameters(), bucket.buffer())


# DDP compares annotations with classes; `from __future__ import annotations` makes them strings.
reduce_bucket.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[Tensor]})


def check_options(model: DistributedDataParallel) -> None:
    """Require the options of DDP on which the communication hook depends.

    With `static_graph`, for one, DDP skips its hooks until it has seen a whole backward, so the
    first bucket would have no partial gradients.

    Raises:
        UnsupportedError: One of the options is set.
    """
    names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    found = [name for name in names if getattr(model, name)]
    if found:
        raise UnsupportedError(
            expected=f"DistributedDataParallel({', '.join(f'{name}=False' for name in names)})",
            received=", ".join(f"{name}=True" for name in found),
            remedy="leave these options out; or pass the model itself to Gradients, where absent "
            "gradients are zeros",
        )
