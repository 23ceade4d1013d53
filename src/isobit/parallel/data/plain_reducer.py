"""The gradient reducer of a plain model, which neither DDP nor FSDP2 wraps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from isobit.order.tree import Node
from isobit.parallel.collectives.bucketed_all_reduce import BucketedAllReduce
from isobit.parallel.collectives.levels import Group
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.data.gradient_hooks import (
    expect_partial_gradients,
    own_gradient,
    register_hooks,
    restore_grad_dtype,
    trained_parameters,
)
from isobit.parallel.data.partial_gradients import PartialGradients
from isobit.parallel.data.reducer_checks import (
    check_any_gradient,
    check_not_distributed,
    check_one_dtype,
    check_rank_order,
    check_same_parameters,
)
from isobit.parallel.data.tied_weights import TiedWeights


class PlainReducer:
    """Takes gradients in hooks and all-reduces full buckets while the backward is still running."""

    def __init__(self, model: nn.Module, batch: GlobalBatch, group: Group) -> None:
        """Untie weights, allocate buckets and register hooks on the parameters."""
        check_rank_order(batch)
        check_not_distributed(model)
        self._buckets: BucketedAllReduce | None = None
        if batch.ranks > 1:
            dtype, device = check_one_dtype([p for p in model.parameters() if p.requires_grad])
        self._model, self._batch, self._tied = model, batch, TiedWeights(model)
        # In the order in which backward delivers gradients: the last layer first.
        self._parameters = [p for p in reversed(self._tied.leaves) if p.requires_grad]
        self._partials = PartialGradients(self._parameters)
        if batch.ranks > 1:
            sizes = [p.numel() for p in self._parameters]
            kinds = {p.dtype for p in self._parameters}
            rounded = kinds.pop() if len(kinds) == 1 and kinds != {dtype} else None
            self._buckets = BucketedAllReduce(
                sizes, group, dtype=dtype, device=device, rounded=rounded
            )
        self._index: dict[Tensor, int] = {p: i for i, p in enumerate(self._parameters)}
        self._current: tuple[Node, bool] | None = None  # (node, last) of the open micro-batch
        self._hooks = register_hooks(self._take, self._parameters)

    @property
    def peak_bytes(self) -> int:
        """See `GradientReducer.peak_bytes`."""
        return self._partials.peak_bytes

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The model's parameters, a tied one once for each use."""
        return trained_parameters(self._model)

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Open a micro-batch."""
        check_same_parameters(self._model, self._parameters)
        self._tied.check_shared_memory()
        expect_partial_gradients(self._parameters, self._batch)
        self._current = node, last
        return nullcontext()

    def _take(self, parameter: Tensor) -> None:
        if self._current is None:
            return  # a backward outside micro_batch() belongs to the user
        node, last = self._current
        value, parameter.grad = own_gradient(parameter), None
        self._partials.push(parameter, node, value)
        if last and self._buckets is not None:
            root = self._partials.take(parameter, self._rank_root(node))
            self._buckets.ready(self._index[parameter], root)

    def end(self, node: Node, last: bool) -> None:
        """Close a micro-batch; after the last one, wait for the buckets and write `p.grad`."""
        self._current = None
        absent = self._partials.complete(node)
        check_any_gradient(absent, self._parameters)
        if not last:
            return
        root = self._rank_root(node)
        if self._buckets is None:
            totals = [self._partials.take(p, root) for p in self._parameters]
        else:
            for parameter in absent:
                self._buckets.ready(self._index[parameter], self._partials.take(parameter, root))
            flat = self._buckets.finish()
            totals = [t.view(p.shape) for p, t in zip(self._parameters, flat, strict=True)]
        restore_grad_dtype(self._parameters)
        by_leaf = dict(zip(self._parameters, totals, strict=True))
        settled = self._buckets is not None
        for parameter, gradient in self._tied.round_and_add(by_leaf, settled).items():
            parameter.grad = gradient

    def _rank_root(self, node: Node) -> Node:
        """Return the subtree over all micro-batches of this rank."""
        return node.ancestor(self._batch.micro_batches)

    def clear(self) -> None:
        """Drop everything of this step."""
        self._current = None
        self._partials.clear()
        if self._buckets is not None:
            self._buckets.clear()
        for parameter in self._parameters:
            parameter.grad = None
        restore_grad_dtype(self._parameters)

    def close(self) -> None:
        """Remove the hooks and tie weights again."""
        for hook in self._hooks:
            hook.remove()
        self._partials.clear()
        restore_grad_dtype(self._parameters)
        self._tied.close()
