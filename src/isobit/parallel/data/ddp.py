"""Gradients of a DistributedDataParallel model: its buckets, its overlap, its hook; our order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from isobit.errors import UnsupportedError
from isobit.ops.portable.rounding import settle_nans
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Node
from isobit.parallel.collectives import all_reduce
from isobit.parallel.data.batch import GlobalBatch
from isobit.parallel.data.partials import Partials
from isobit.parallel.data.reducer import (
    narrow,
    prepare,
    refuse_changed,
    refuse_idle,
    refuse_order,
    take_with,
    trained_leaves,
    unaliased,
)


class DdpCarrier:
    """Micro-batches run under no_sync into the counter; in the last one the hook exchanges what the counter holds."""

    def __init__(self, model: DistributedDataParallel, batch: GlobalBatch) -> None:
        refuse_tied(model)
        refuse_order(batch)
        refuse_options(model)
        self._model, self._batch = model, batch
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._partials = Partials(self._parameters)
        self._roots: dict[Tensor, Tensor] = {}
        self._under_way: tuple[Node, bool] | None = None
        model.register_comm_hook(self, exchange_bucket)  # once a model; it cannot be taken off
        self._hooks = take_with(self._take, self._parameters)

    @property
    def peak_bytes(self) -> int:
        return self._partials.peak_bytes

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        return trained_leaves(self._model.module)

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        refuse_changed(self._model.module, self._parameters)
        prepare(self._parameters, self._batch)
        self._under_way = node, last
        return nullcontext() if last else self._model.no_sync()

    def _take(self, parameter: Tensor) -> None:
        """Runs before DDP's own hook, which copies p.grad into its bucket: of the last one it may have the root."""
        if self._under_way is None:
            return
        node, last = self._under_way
        value, parameter.grad = unaliased(parameter), None
        self._partials.push(parameter, node, value)
        if last:
            root = self._partials.take(parameter, node.ancestor(self._batch.micro_batches))
            self._roots[parameter] = root
            parameter.grad_dtype = parameter.dtype
            parameter.grad = root.to(parameter.dtype)

    def exchange(self, parameters: list[Tensor], buffer: Tensor) -> torch.futures.Future[Tensor]:
        """The roots of a bucket's parameters, added over the ranks, rounded once into the bucket."""
        if self._under_way is None:
            raise UnsupportedError(
                expected="a backward inside Gradients.micro_batch",
                received="a backward of its own",
                remedy="run it under model.no_sync(), or wrap the module in DistributedDataParallel anew",
            )
        roots = [self._roots.pop(p) for p in parameters]
        flat = torch.cat([root.reshape(-1).to(accumulation_dtype(root.dtype)) for root in roots])
        work = all_reduce.all_reduce(flat, self._model.process_group, async_op=True)

        def round_once(_: Any) -> Tensor:
            return settle_nans(buffer.copy_(flat))

        assert work is not None
        return work.get_future().then(round_once)

    def end(self, node: Node, last: bool) -> None:
        self._under_way = None
        absent = self._partials.complete(node)
        refuse_idle(absent, self._parameters)
        if last and absent:
            raise UnsupportedError(
                expected="a gradient of every parameter in the last micro-batch, or buckets are not exchanged",
                received=f"none for {len(absent)} of {len(self._parameters)}",
                remedy="pass the model itself to Gradients: absent gradients are zeros there",
            )

    def clear(self) -> None:
        self._under_way = None
        self._partials.clear()
        self._roots.clear()
        for parameter in self._parameters:
            parameter.grad = None
        narrow(self._parameters)
        self._model.reducer._reset_state()  # or the next micro-batch's gradients would be taken for the failed one's

    def close(self) -> None:
        """DDP keeps a communication hook once it is set: a backward of its own is refused."""
        for hook in self._hooks:
            hook.remove()
        self._partials.clear()
        narrow(self._parameters)


def exchange_bucket(carrier: DdpCarrier, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    return carrier.exchange(bucket.parameters(), bucket.buffer())


# DDP compares the annotations themselves, which are words in a module that postpones them.
exchange_bucket.__annotations__.update(
    bucket=GradBucket, **{"return": torch.futures.Future[Tensor]}
)


def refuse_options(model: DistributedDataParallel) -> None:
    """Options under which the wrapper takes gradients in another way than the hook relies on.

    With static_graph it skips its own hooks until it has seen a whole backward: no bucket would find its roots.
    """
    names = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    found = [name for name in names if getattr(model, name)]
    if found:
        raise UnsupportedError(
            expected=f"DistributedDataParallel({', '.join(f'{name}=False' for name in names)})",
            received=", ".join(f"{name}=True" for name in found),
            remedy="leave these options out; or pass the model itself to Gradients, whose absent gradients are zeros",
        )


def refuse_tied(model: nn.Module) -> None:
    """A tied weight's uses are told apart by a leaf each, which the engine would not know."""
    seen: set[Tensor] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter in seen:
                raise UnsupportedError(
                    expected="parameters that one module each uses",
                    received=f"a tied parameter {list(parameter.shape)}",
                    remedy="pass the model itself to Gradients, without the wrapper; or untie the weights",
                )
            if parameter is not None:
                seen.add(parameter)
