"""Who takes what autograd delivers and brings the ranks together: the interface, and the carrier of a plain model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isobit.errors import ArgumentError
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Node
from isobit.parallel.batch import GlobalBatch
from isobit.parallel.buckets import BucketedExchange
from isobit.parallel.partials import Partials


class Carrier(Protocol):
    """One way of training; `Gradients` opens and closes it around each micro-batch."""

    peak_bytes: int

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Before a micro-batch's forward: its subtree of the sample tree."""

    def end(self, node: Node, last: bool) -> None:
        """After its backward; after the last one every p.grad is the global batch's, rounded once."""

    def clear(self) -> None:
        """After a failure: nothing of the step is kept."""

    def close(self) -> None:
        """Leaves the model as it was found."""


class OwnCarrier:
    """Takes each parameter's gradient as autograd delivers it, and exchanges buckets while backward still runs."""

    def __init__(self, model: nn.Module, batch: GlobalBatch, group: dist.ProcessGroup | None) -> None:
        self._uses = Uses(model)
        self._parameters = [p for p in reversed(self._uses.leaves) if p.requires_grad]  # as backward delivers them
        self._partials, self._batch = Partials(self._parameters), batch
        self._exchange = None
        if batch.ranks > 1:
            self._exchange = BucketedExchange([p.numel() for p in self._parameters], group)
        self._place = {p: i for i, p in enumerate(self._parameters)}
        self._under_way: tuple[Node, bool] | None = None
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._take) for p in self._parameters
        ]

    @property
    def peak_bytes(self) -> int:
        return self._partials.peak_bytes

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        widen(self._parameters)
        self._under_way = node, last
        return nullcontext()

    def _take(self, parameter: Tensor) -> None:
        if self._under_way is None:
            return  # a backward outside micro_batch is the user's own
        node, last = self._under_way
        value, parameter.grad = unaliased(parameter), None
        self._partials.push(parameter, node, value)
        if last and self._exchange is not None:
            self._exchange.ready(self._place[parameter], self._partials.take(parameter, self._root_above(node)))

    def end(self, node: Node, last: bool) -> None:
        self._under_way = None
        absent = self._partials.complete(node)
        if not last:
            return
        root = self._root_above(node)
        if self._exchange is None:
            totals = [self._partials.take(p, root) for p in self._parameters]
        else:
            for parameter in absent:
                self._exchange.ready(self._place[parameter], self._partials.take(parameter, root))
            totals = [t.view(p.shape) for p, t in zip(self._parameters, self._exchange.finish(), strict=True)]
        deliver(self._uses.add(dict(zip(self._parameters, totals, strict=True))))

    def _root_above(self, node: Node) -> Node:
        return node.ancestor(self._batch.micro_batches)

    def clear(self) -> None:
        self._under_way = None
        self._partials.clear()
        if self._exchange is not None:
            self._exchange.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        narrow(self._parameters)
        self._uses.close()


class Uses:
    """A leaf for each use of a parameter: a tied weight has one gradient tree a use, and the uses are added last."""

    def __init__(self, model: nn.Module) -> None:
        self.leaves: list[nn.Parameter] = []
        self._first: dict[nn.Parameter, nn.Parameter] = {}  # of each alias: the parameter itself
        self._placed: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in self._first:
                    leaf = parameter
                else:
                    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    module._parameters[name] = leaf
                    self._placed.append((module, name, parameter))
                self._first[leaf] = parameter
                self.leaves.append(leaf)

    def add(self, totals: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The gradient of each parameter, from those of its uses, in the order of the modules."""
        added: dict[nn.Parameter, Tensor] = {}
        for leaf in self.leaves:
            if leaf in totals:
                first = self._first[leaf]
                added[first] = totals[leaf] if first not in added else added[first].add_(totals[leaf])
        return added

    def close(self) -> None:
        """Ties again what was tied."""
        for module, name, parameter in self._placed:
            module._parameters[name] = parameter


def widen(parameters: list[nn.Parameter]) -> None:
    """Before a step: gradients to come are partials, in the dtype that sums have."""
    for parameter in parameters:
        if parameter.grad is not None:
            raise ArgumentError(
                expected="no gradient from before",
                received=f"a gradient of a parameter {list(parameter.shape)}",
                remedy="call optimizer.zero_grad() after optimizer.step()",
            )
        parameter.grad_dtype = accumulation_dtype(parameter.dtype)


def narrow(parameters: list[nn.Parameter]) -> None:
    """Gradients have the parameter's own dtype again."""
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad.to(parameter.dtype)
        parameter.grad_dtype = parameter.dtype


def deliver(totals: dict[nn.Parameter, Tensor]) -> None:
    """Rounds once, and hands each gradient to its parameter."""
    for parameter, total in totals.items():
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = total.to(parameter.dtype)


def unaliased(parameter: Tensor) -> Tensor:
    """The gradient as memory of its own: partials are added in place, and autograd may deliver an expanded view."""
    grad = parameter.grad
    assert grad is not None
    return grad.contiguous()
