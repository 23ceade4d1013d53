"""Who takes what autograd delivers and brings the ranks together: the interface, and the carrier of a plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isobit.errors import ArgumentError, UnsupportedError
from isobit.ops.portable.rounding import settle_nans
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Node
from isobit.parallel.collectives.additions import add_into, round_total
from isobit.parallel.collectives.buckets import BucketedExchange
from isobit.parallel.data.batch import GlobalBatch
from isobit.parallel.data.partials import Partials


class Carrier(Protocol):
    """One way of training; `Gradients` opens and closes it around each micro-batch."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that partials held at the end of a micro-batch."""

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors that autograd delivers gradients to, by name."""

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

    def __init__(
        self, model: nn.Module, batch: GlobalBatch, group: dist.ProcessGroup | None
    ) -> None:
        refuse_order(batch)
        self._exchange = None
        if batch.ranks > 1:
            dtype, device = one_kind([p for p in model.parameters() if p.requires_grad])
        self._model, self._batch, self._uses = model, batch, Uses(model)
        self._parameters = [
            p for p in reversed(self._uses.leaves) if p.requires_grad
        ]  # as backward delivers them
        self._partials = Partials(self._parameters)
        if batch.ranks > 1:
            sizes = [p.numel() for p in self._parameters]
            self._exchange = BucketedExchange(sizes, group, dtype=dtype, device=device)
        self._place: dict[Tensor, int] = {p: i for i, p in enumerate(self._parameters)}
        self._under_way: tuple[Node, bool] | None = None
        self._hooks = take_with(self._take, self._parameters)

    @property
    def peak_bytes(self) -> int:
        return self._partials.peak_bytes

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        return trained_leaves(self._model)

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        refuse_changed(self._model, self._parameters)
        self._uses.refuse_parted()
        prepare(self._parameters, self._batch)
        self._under_way = node, last
        return nullcontext()

    def _take(self, parameter: Tensor) -> None:
        if self._under_way is None:
            return  # a backward outside micro_batch is the user's own
        node, last = self._under_way
        value, parameter.grad = unaliased(parameter), None
        self._partials.push(parameter, node, value)
        if last and self._exchange is not None:
            self._exchange.ready(
                self._place[parameter], self._partials.take(parameter, self._root_above(node))
            )

    def end(self, node: Node, last: bool) -> None:
        self._under_way = None
        absent = self._partials.complete(node)
        refuse_idle(absent, self._parameters)
        if not last:
            return
        root = self._root_above(node)
        if self._exchange is None:
            totals = [self._partials.take(p, root) for p in self._parameters]
        else:
            for parameter in absent:
                self._exchange.ready(self._place[parameter], self._partials.take(parameter, root))
            totals = [
                t.view(p.shape)
                for p, t in zip(self._parameters, self._exchange.finish(), strict=True)
            ]
        narrow(self._parameters)
        for parameter, total in self._uses.add(
            dict(zip(self._parameters, totals, strict=True))
        ).items():
            parameter.grad = total

    def _root_above(self, node: Node) -> Node:
        return node.ancestor(self._batch.micro_batches)

    def clear(self) -> None:
        self._under_way = None
        self._partials.clear()
        if self._exchange is not None:
            self._exchange.clear()
        for parameter in self._parameters:
            parameter.grad = None
        narrow(self._parameters)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._partials.clear()
        narrow(self._parameters)
        self._uses.close()


def take_with(
    take: Callable[[Tensor], None], parameters: list[nn.Parameter]
) -> list[RemovableHandle]:
    """Calls `take` whenever autograd has delivered a gradient."""
    return [p.register_post_accumulate_grad_hook(take) for p in parameters]  # type: ignore[no-untyped-call]


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
                    leaf.__deepcopy__ = partial(copy.deepcopy, parameter)  # type: ignore[method-assign]  # copies are tied
                    module._parameters[name] = leaf
                    self._placed.append((module, name, parameter))
                self._first[leaf] = parameter
                self.leaves.append(leaf)

    def add(self, totals: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The gradient of each parameter: those of its uses, each rounded once, added in the order of the modules.

        So it is where autograd adds the uses of a whole batch, whose operators round.
        """
        added: dict[nn.Parameter, Tensor] = {}
        for leaf in self.leaves:
            if leaf in totals:
                first, rounded = self._first[leaf], round_total(totals[leaf], leaf.dtype)
                added[first] = (
                    rounded if first not in added else settle_nans(add_into(added[first], rounded))
                )
        return added

    def refuse_parted(self) -> None:
        """The uses of a parameter are its memory, which another dtype or device gives each of them anew."""
        if any(leaf.data_ptr() != first.data_ptr() for leaf, first in self._first.items()):
            raise ArgumentError(
                expected="tied parameters in the memory that they had when Gradients was made",
                received="memory of their own",
                remedy="convert and move the model first, then make Gradients",
            )

    def close(self) -> None:
        """Ties again what was tied."""
        for module, name, parameter in self._placed:
            module._parameters[name] = parameter


def one_kind(parameters: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """The dtype of all their partials, and where they are: buckets hold one kind."""
    kinds = {(accumulation_dtype(p.dtype), p.device) for p in parameters}
    if len(kinds) > 1:
        raise UnsupportedError(
            expected="parameters on one device, all of fp64 or none",
            received=", ".join(
                sorted(f"partials of {dtype} on {device}" for dtype, device in kinds)
            ),
            remedy="convert the model to one dtype and device",
        )
    return kinds.pop() if kinds else (torch.float32, torch.device("cpu"))


def refuse_order(batch: GlobalBatch) -> None:
    """A rank merges its own micro-batches first, so they must be one run."""
    if batch.order != "rank" and batch.ranks > 1 and batch.micro_batches > 1:
        raise UnsupportedError(
            expected="a batch whose ranks hold a run each: GlobalBatch(..., order='rank')",
            received=f"order={batch.order!r}",
            remedy="keep order='micro' for fully_shard, which adds the ranks at every micro-batch",
        )


def refuse_changed(model: nn.Module, known: list[nn.Parameter]) -> None:
    """A parameter that nobody collects would keep the gradient of its rank's last micro-batch."""
    trained = {p for p in model.parameters() if p.requires_grad}
    if trained != set(known):
        raise ArgumentError(
            expected=f"the {len(known)} trained parameters that Gradients was made with",
            received=f"{len(trained - set(known))} others, and {len(set(known) - trained)} of them gone or frozen",
            remedy="close(), and make Gradients anew after parameters are replaced, frozen or unfrozen",
        )


def refuse_leftovers(parameters: list[nn.Parameter]) -> None:
    """A step begins from nothing."""
    for parameter in parameters:
        if parameter.grad is not None:
            raise ArgumentError(
                expected="no gradient from before",
                received=f"a gradient of a parameter {list(parameter.shape)}",
                remedy="call optimizer.zero_grad(), which sets gradients to None, after optimizer.step()",
            )


def refuse_idle(absent: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """A backward after the block would leave this rank's own gradient in p.grad, unexchanged."""
    if parameters and len(absent) == len(parameters):
        raise UnsupportedError(
            expected="a backward inside Gradients.micro_batch",
            received=f"a gradient of none of {len(parameters)} parameters",
            remedy="call backward before the block ends, also of a share whose loss is zero",
        )


def trained_leaves(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A model's own parameters, each once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def prepare(parameters: list[nn.Parameter], batch: GlobalBatch) -> None:
    """Before a micro-batch: gradients to come are partials, in the dtype that sums have; of the whole batch, rounded.

    Where autograd converts a gradient, its mark is lost: the dtype is that of what the operators return.
    """
    refuse_leftovers(parameters)
    for parameter in parameters if batch.shares > 1 else ():
        parameter.grad_dtype = accumulation_dtype(parameter.dtype)


def narrow(parameters: list[nn.Parameter]) -> None:
    """Gradients have the parameter's own dtype again."""
    for parameter in parameters:
        parameter.grad_dtype = parameter.dtype


def unaliased(parameter: Tensor) -> Tensor:
    """The gradient as memory of its own: partials are added in place, and autograd may deliver an expanded view."""
    grad = parameter.grad
    assert grad is not None
    return grad.contiguous()
