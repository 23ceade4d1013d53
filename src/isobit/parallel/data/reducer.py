"""Gradient reducers: the interface, what they share, and the one for an unwrapped model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.ops.arguments import refuse_distributed
from isobit.ops.portable.sums import settle_nans
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives.elementwise_add import add_into, round_total
from isobit.parallel.collectives.levels import Group, Levels, ranks_of
from isobit.parallel.collectives.tree_collectives import BucketedAllReduce
from isobit.parallel.data.global_batch import GlobalBatch
from isobit.parallel.tensor.expert_exchange import exchange_of


class GradientReducer(Protocol):
    """Accumulates gradients over micro-batches and reduces them over ranks.

    `Gradients` calls `begin` and `end` around each micro-batch. `node` is the subtree of the sample
    tree that the micro-batch sums; `last` is true for the last micro-batch of the step.
    """

    @property
    def peak_bytes(self) -> int:
        """The largest memory of partial gradients at the end of any micro-batch so far."""

    @property
    def leaves(self) -> list[tuple[str, Tensor]]:
        """The tensors to which autograd delivers gradients, with their names."""

    def begin(self, node: Node, last: bool) -> AbstractContextManager[Any]:
        """Prepare for the forward; the context is open during forward and backward."""

    def end(self, node: Node, last: bool) -> None:
        """Finish after the backward; after the last one every `p.grad` is complete and rounded."""

    def clear(self) -> None:
        """Drop everything of this step, after a failure."""

    def close(self) -> None:
        """Remove all hooks from the model."""


# Checks that gradient reducers share: of the batch, the parameters and the gradients present.


def check_one_dtype(parameters: list[nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of all partial gradients, which share buckets.

    Raises:
        UnsupportedError: The parameters need more than one dtype or device.
    """
    kinds = {(accumulation_dtype(p.dtype), p.device) for p in parameters}
    if len(kinds) > 1:
        found = sorted(f"partial gradients of {dtype} on {device}" for dtype, device in kinds)
        raise UnsupportedError(
            expected="parameters on one device, either all or none of them fp64",
            received=", ".join(found),
            remedy="convert the model to one dtype and device",
        )
    return kinds.pop() if kinds else (torch.float32, torch.device("cpu"))


def check_not_distributed(model: nn.Module) -> None:
    """Require plain parameters: only `fully_shard` (FSDP2) has a reducer that knows shards.

    Raises:
        UnsupportedError: A trained parameter is a DTensor.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_distributed(name, parameter)


def check_rank_order(batch: GlobalBatch) -> None:
    """Require that each rank's micro-batches are consecutive: they are merged before the ranks are.

    Raises:
        UnsupportedError: The batch has `order="micro"`.
    """
    if batch.order != "rank" and batch.ranks > 1 and batch.micro_batches > 1:
        raise UnsupportedError(
            expected="consecutive samples on each rank: GlobalBatch(..., order='rank')",
            received=f"order={batch.order!r}",
            remedy="leave order out; or pass the model itself or one of fully_shard to Gradients, which "
            "add the ranks at every micro-batch",
        )


def check_same_parameters(model: nn.Module, known: list[nn.Parameter]) -> None:
    """Require the parameters that have hooks: another would keep an unreduced gradient.

    Raises:
        ArgumentError: Parameters were replaced, frozen or unfrozen.
    """
    trained = {p for p in model.parameters() if p.requires_grad}
    if trained != set(known):
        added, gone = len(trained - set(known)), len(set(known) - trained)
        raise ArgumentError(
            expected=f"the {len(known)} trained parameters that Gradients was made with",
            received=f"{added} others, and {gone} of them gone or frozen",
            remedy="call close() and make a new Gradients after parameters are replaced, frozen or "
            "unfrozen",
        )


def check_no_leftover_gradients(parameters: list[nn.Parameter]) -> None:
    """Require that every `p.grad` is None at the start of a micro-batch.

    Raises:
        ArgumentError: A parameter has a gradient.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            raise ArgumentError(
                expected="no gradient from before",
                received=f"a gradient of a parameter {list(parameter.shape)}",
                remedy="call optimizer.zero_grad(), which sets gradients to None, after each step",
            )


def check_any_gradient(absent: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """Require a backward: one after the block would leave this rank's own gradient in `p.grad`.

    Raises:
        UnsupportedError: No parameter has a gradient of this micro-batch.
    """
    if parameters and len(absent) == len(parameters):
        raise UnsupportedError(
            expected="a backward inside Gradients.micro_batch",
            received=f"a gradient of none of {len(parameters)} parameters",
            remedy="call backward before the block ends, also if the loss of the share is zero",
        )


# Post-accumulate-grad hooks, and the dtype of `p.grad` while partial gradients are collected.


def register_hooks(
    take: Callable[[Tensor], None], parameters: list[nn.Parameter]
) -> list[RemovableHandle]:
    """Call `take(parameter)` whenever autograd has written a parameter's gradient."""
    return [p.register_post_accumulate_grad_hook(take) for p in parameters]  # type: ignore[no-untyped-call]


def trained_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that require gradients, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def expect_partial_gradients(parameters: list[nn.Parameter], batch: GlobalBatch) -> None:
    """Let autograd write unrounded gradients, before a micro-batch.

    A gradient of a share of the batch has the dtype of sums (fp32 for 16-bit parameters); one of
    the whole batch is already rounded. Autograd must not convert it: a conversion loses the operator's
    mark, [Note: one delivery per parameter].

    Raises:
        ArgumentError: A parameter still has a gradient.
    """
    check_no_leftover_gradients(parameters)
    for parameter in parameters if batch.shares > 1 else ():
        parameter.grad_dtype = accumulation_dtype(parameter.dtype)


def restore_grad_dtype(parameters: list[nn.Parameter]) -> None:
    """Give gradients the dtype of their parameters again."""
    for parameter in parameters:
        parameter.grad_dtype = parameter.dtype


def own_gradient(parameter: Tensor) -> Tensor:
    """Return `p.grad` in memory that may be written to: autograd may deliver an expanded view."""
    grad = parameter.grad
    assert grad is not None
    return grad.contiguous()


# Partial gradients of an unfinished step: one binary counter per parameter.


class PartialGradients:
    """Merges unrounded gradients of micro-batches along the sample tree.

    A counter has at most one partial gradient per level of the tree, so log2(micro-batches) + 1 in
    all. Two are merged by adding the right one to the left one in place.

    Args:
        parameters: The parameters whose gradients are pushed.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Make an empty counter for each parameter."""
        self._counters: dict[Tensor, Counter[Tensor]] = {p: Counter(add_into) for p in parameters}
        self._pushed: set[Tensor] = set()  # the parameters that have a gradient of this micro-batch
        self.peak_bytes = 0

    def push(self, parameter: Tensor, node: Node, value: Tensor) -> None:
        """Add the gradient of the next micro-batch; `value` is overwritten later."""
        self._pushed.add(parameter)
        self._counters[parameter].push(node, value)

    def complete(self, node: Node) -> list[Tensor]:
        """End a micro-batch: push +0.0 for parameters without a gradient, and return these.

        The zeros are added like any other value, since adding +0.0 may change the bits of -0.0.
        """
        absent = [p for p in self._counters if p not in self._pushed]
        for parameter in absent:
            dtype = accumulation_dtype(parameter.dtype)
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self.push(parameter, node, zeros)
        self._pushed.clear()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return absent

    def take(self, parameter: Tensor, node: Node) -> Tensor:
        """Remove and return the gradient of a whole subtree.

        Raises:
            CutError: The micro-batches pushed so far are not exactly this subtree.
        """
        counter = self._counters[parameter]
        held = [(n.first, n.stop) for n, _ in counter]
        if held != [(node.first, node.stop)]:
            raise CutError(
                expected=f"segments {node.first} to {node.stop}, each once",
                received=f"segments {held}",
                remedy="run every micro-batch of the step once, in order, each with one backward",
            )
        ((_, total),) = counter
        counter.clear()
        return total

    @property
    def held_bytes(self) -> int:
        """The memory of all partial gradients now."""
        return sum(value.nbytes for counter in self._counters.values() for _, value in counter)

    def clear(self) -> None:
        """Drop everything: the step was abandoned."""
        self._pushed.clear()
        for counter in self._counters.values():
            counter.clear()


# Tied weights: parameters that several modules use, such as embeddings shared with the LM head.


class TiedWeights:
    """Gives every use of a tied parameter a leaf of its own in the same memory.

    Each use then has a gradient of its own, which is one sum over the samples. The gradients of the
    uses are rounded and added at the end, as autograd does for a whole batch.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace every use but the first of each tied parameter by a leaf of its own."""
        self.leaves: list[nn.Parameter] = []  # in the order of the modules
        self._original: dict[nn.Parameter, nn.Parameter] = {}  # by leaf
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                leaf = parameter
                if parameter in self._original:
                    leaf = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    # A deep copy of the model has tied weights again.
                    leaf.__deepcopy__ = partial(copy.deepcopy, parameter)  # type: ignore[method-assign]
                    module._parameters[name] = leaf
                    self._replaced.append((module, name, parameter))
                self._original[leaf] = parameter
                self.leaves.append(leaf)

    def round_and_add(
        self, totals: dict[nn.Parameter, Tensor], settled: bool
    ) -> dict[nn.Parameter, Tensor]:
        """Round each use's gradient once, then add the uses in the order of the modules.

        `settled` sums, those of an exchange, have one NaN already.
        """
        added: dict[nn.Parameter, Tensor] = {}
        for leaf in self.leaves:
            if leaf in totals:
                first, rounded = self._original[leaf], totals[leaf]
                if not settled or rounded.dtype != leaf.dtype:
                    rounded = round_total(rounded, leaf.dtype)
                added[first] = (
                    rounded if first not in added else settle_nans(add_into(added[first], rounded))
                )
        return added

    def check_shared_memory(self) -> None:
        """Require that all uses still share memory.

        Raises:
            ArgumentError: The model was converted or moved, which gave each use its own memory.
        """
        if any(leaf.data_ptr() != first.data_ptr() for leaf, first in self._original.items()):
            raise ArgumentError(
                expected="tied parameters in the memory that they had when Gradients was made",
                received="memory of their own",
                remedy="convert and move the model first, then make Gradients",
            )

    def close(self) -> None:
        """Put the tied parameters back."""
        for module, name, parameter in self._replaced:
            module._parameters[name] = parameter


def check_not_tied(model: nn.Module) -> None:
    """Require that each parameter is used by one module: DDP and FSDP2 do not know extra leaves.

    Raises:
        UnsupportedError: The model has a tied parameter.
    """
    seen: set[Tensor] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter in seen:
                raise UnsupportedError(
                    expected="parameters that one module each uses",
                    received=f"a tied parameter {list(parameter.shape)}",
                    remedy="pass the model itself to Gradients, without the wrapper; or untie the "
                    "weights",
                )
            if parameter is not None:
                seen.add(parameter)


# The gradient reducer of a plain model, which neither DDP nor FSDP2 wraps.


class Exchange:
    """An all-reduce of some parameters' gradients over one group of ranks."""

    def __init__(self, parameters: list[nn.Parameter], group: Group, rounds: bool) -> None:
        """Allocate buckets; sums are rounded on their way back if `rounds`."""
        dtype, device = check_one_dtype(parameters)
        kinds = {p.dtype for p in parameters}
        rounded = kinds.pop() if rounds and len(kinds) == 1 and kinds != {dtype} else None
        self.index = {p: i for i, p in enumerate(parameters)}
        self.buckets = BucketedAllReduce(
            [p.numel() for p in parameters], group, dtype=dtype, device=device, rounded=rounded
        )

    def ready(self, parameter: Any, value: Tensor) -> None:
        """Give the gradient of this rank."""
        self.buckets.ready(self.index[parameter], value)

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """Return the sums over the ranks."""
        return {p: t.view(p.shape) for p, t in zip(self.index, self.buckets.finish(), strict=True)}


def expert_groups(model: nn.Module, batch: GlobalBatch, group: Group) -> tuple[int, Group]:
    """Return how many ranks exchange rows of experts, and the group of ranks that have the same experts, if any.

    Raises:
        ArgumentError: The ranks that exchange rows are not the data-parallel ones, or their innermost level.
        UnsupportedError: Micro-batches are not consecutive samples over these ranks.
    """
    found = [exchange_of(p) for p in model.parameters()]
    held = {tuple(ranks_of(ranks.group)): ranks for ranks in found if ranks is not None}
    if not held:
        return 1, None
    levels = group.groups if isinstance(group, Levels) else (group,)
    inner = tuple(ranks_of(levels[0]))
    if set(held) != {inner}:
        raise ArgumentError(
            expected=f"experts that are split over the innermost data-parallel ranks, {list(inner)}",
            received=f"experts split over ranks {' and '.join(str(list(ranks)) for ranks in held)}",
            remedy='pass group=mesh["ep"].get_group(); or group=isobit.parallel.Levels(mesh["dp", "ep"]) if there are '
            "several groups that have all experts",
        )
    if batch.order != "micro" and batch.micro_batches > 1:
        raise UnsupportedError(
            expected="consecutive samples in a micro-batch of all ranks, since an expert has rows of all of them",
            received=f"order={batch.order!r} with {batch.micro_batches} micro-batches",
            remedy="use GlobalBatch(…, order='micro')",
        )
    if len(levels) == 1:
        return len(inner), None
    outer = levels[1] if len(levels) == 2 else Levels.from_groups(*levels[1:], check_hosts=False)
    return len(inner), outer


class PlainReducer:
    """Takes gradients in hooks and all-reduces full buckets while the backward is still running.

    Each rank's micro-batches are merged before ranks are, unless micro-batches have consecutive samples
    (`order="micro"`): then ranks are added after every micro-batch. Experts that are split over ranks have gradients of
    the samples of all these ranks, and are added only to those of ranks that have the same experts.
    """

    def __init__(self, model: nn.Module, batch: GlobalBatch, group: Group) -> None:
        """Untie weights, allocate buckets and register hooks on the parameters."""
        check_not_distributed(model)
        inner, outer = expert_groups(model, batch, group)
        if batch.ranks > 1:
            check_one_dtype([p for p in model.parameters() if p.requires_grad])
        self._model, self._batch, self._tied = model, batch, TiedWeights(model)
        # In the order in which backward delivers gradients: the last layer first.
        self._parameters = [p for p in reversed(self._tied.leaves) if p.requires_grad]
        self._partials = PartialGradients(self._parameters)
        exchanged = [p for p in self._parameters if exchange_of(p) is not None]
        self._is_whole = {p for p in exchanged if inner == batch.shares}
        self._each = batch.ranks > 1 and (batch.order == "micro" or bool(exchanged))
        everywhere = [p for p in self._parameters if exchange_of(p) is None]
        self._exchanges = [
            Exchange(parameters, over, rounds=batch.micro_batches == 1 or not self._each)
            for parameters, over in ((everywhere, group), (exchanged, outer))
            if parameters and batch.ranks > 1 and (over is not None or parameters is everywhere)
        ]
        self._exchange_of: dict[Tensor, Exchange] = {p: e for e in self._exchanges for p in e.index}
        self._held: dict[
            Tensor, Tensor
        ] = {}  # of this micro-batch, where ranks are added after each
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
        partials = [p for p in self._parameters if p not in self._is_whole]
        check_no_leftover_gradients(self._parameters)
        expect_partial_gradients(partials, self._batch)
        self._current = node, last
        return nullcontext()

    def _take(self, parameter: Tensor) -> None:
        if self._current is None:
            return  # a backward outside micro_batch() belongs to the user
        node, last = self._current
        value, parameter.grad = own_gradient(parameter), None
        if self._each:
            self._hold(parameter, value)
            return
        self._partials.push(parameter, node, value)
        if last and self._exchanges:
            self._exchange_of[parameter].ready(
                parameter, self._partials.take(parameter, self._rank_root(node))
            )

    def _hold(self, parameter: Tensor, value: Tensor) -> None:
        """Take a gradient of which the ranks are added in this micro-batch."""
        self._held[parameter] = value
        if parameter in self._exchange_of:
            self._exchange_of[parameter].ready(parameter, value)

    def end(self, node: Node, last: bool) -> None:
        """Close a micro-batch; after the last one, wait for the buckets and write `p.grad`."""
        self._current = None
        if self._each:
            node = self._add_ranks(node)
        absent = self._partials.complete(node)
        check_any_gradient(absent, self._parameters)
        if not last:
            return
        root = self._rank_root(node)
        if self._each or not self._exchanges:
            by_leaf = {p: self._partials.take(p, root) for p in self._parameters}
        else:
            for parameter in absent:
                root_value = self._partials.take(parameter, root)
                self._exchange_of[parameter].ready(parameter, root_value)
            by_leaf = {p: t for e in self._exchanges for p, t in e.finish().items()}
        restore_grad_dtype(self._parameters)
        settled = bool(self._exchanges) and not self._each
        for parameter, gradient in self._tied.round_and_add(by_leaf, settled).items():
            parameter.grad = gradient

    def _add_ranks(self, node: Node) -> Node:
        """Add the ranks' gradients of this micro-batch, push them, and return the node over all ranks."""
        over = node.ancestor(self._batch.ranks)
        if not self._held:
            return over  # no backward ran: check_any_gradient raises
        for parameter in self._parameters:
            if parameter not in self._held:
                dtype = accumulation_dtype(parameter.dtype)
                self._hold(parameter, torch.zeros_like(parameter, dtype=dtype))
        totals = {p: t for e in self._exchanges for p, t in e.finish().items()}
        for parameter in self._parameters:
            self._partials.push(parameter, over, totals.get(parameter, self._held[parameter]))
        self._held.clear()
        return over

    def _rank_root(self, node: Node) -> Node:
        """Return the subtree over all micro-batches of this rank."""
        return node.ancestor(self._batch.micro_batches)

    def clear(self) -> None:
        """Drop everything of this step."""
        self._current = None
        self._partials.clear()
        self._held.clear()
        for exchange in self._exchanges:
            exchange.buckets.clear()
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
