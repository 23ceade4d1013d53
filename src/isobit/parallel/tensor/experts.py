"""Experts that are split over ranks: each rank computes its own experts for the tokens of all.

Either each rank has tokens of its own, whose rows go to the ranks of their experts and back: expert_exchange.py. Or
every rank has all tokens of the group and their routes, as tensor-parallel ranks do, and dispatches the rows of its own
experts. It adds their outputs to one subtree of each token's sum, and the subtrees are added along the tree: whole
segments of experts are on one rank, so that the bits are those of one rank with all experts. The gradient of the
tokens is the same sum; those of an expert's weights need no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops.arguments import check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.experts import portable
from isobit.ops.experts.grouped import grouped_linear
from isobit.ops.experts.routes import Routes
from isobit.ops.portable.sums import round_once
from isobit.ops.share import accumulation_dtype
from isobit.ops.swiglu.op import swiglu
from isobit.order.tree import merge
from isobit.parallel.tensor.expert_exchange import check_count, mix_experts, split_experts
from isobit.parallel.tensor.shard import split_module, tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


@dataclass(frozen=True)
class Local:
    """The routes to one rank's experts, which are counted from 0, and the segments that they are."""

    routes: Routes
    segments: int
    tp_group: TensorParallelGroup

    def add(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Return [T, n], the sum of each token over the experts of all ranks, rounded once."""
        known = self.routes
        total = rows.new_empty(
            len(known.experts), rows.shape[1], dtype=accumulation_dtype(rows.dtype)
        )
        for start in range(0, len(total), portable.ROWS_AT_ONCE):
            at = slice(start, start + portable.ROWS_AT_ONCE)
            scales = None if weights is None else weights[at]
            where = (known.experts[at], known.places[at], known.total, self.segments)
            parts = portable.sum_experts(rows, scales, *where)
            total[at] = merge(list(parts.unbind(0)), torch.add)
        self.tp_group.all_reduce(total)
        return round_once(total, rows.dtype)


def local_routes(routes: Routes, tp_group: TensorParallelGroup) -> Local:
    """Return the routes to this rank's experts.

    Raises:
        CutError: The number of ranks does not divide the segments of the experts.
    """
    segments = portable.segments_of(routes.total)
    if segments % tp_group.size:
        raise CutError(
            expected=f"a number of ranks that divides the {segments} segments of {routes.total} experts",
            received=f"{tp_group.size} ranks",
            remedy=f"use 1 to {segments} ranks, a power of two",
        )
    count = routes.total // tp_group.size
    own = routes.experts - tp_group.rank * count
    own = torch.where((own >= 0) & (own < count), own, count)
    made = Routes.planned(own, routes.weights, count, routes.samples)
    return Local(made, segments // tp_group.size, tp_group)


class Dispatch(torch.autograd.Function):
    """Copies the rows of this rank's experts; the gradient of a token is a sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, local: Local) -> Tensor:
        """Return the rows of this rank's experts, [R, n]."""
        ctx.local, ctx.shape = local, x.shape
        return portable.dispatch_rows(x, local.routes.tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return dx."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.ExpertParallel")()
        return keeping_subnormals(ctx.local.add)(grad, None).view(ctx.shape), None


class Combine(torch.autograd.Function):
    """Adds this rank's experts, then all ranks; the gradient of a weight is computed where its expert is."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, local: Local) -> Tensor:
        """Return the sum of each token, [T, n]."""
        ctx.save_for_backward(rows, weights)
        ctx.local = local
        return keeping_subnormals(local.add)(rows, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of this rank's rows, and of all weights."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.ExpertParallel")()
        rows, weights = ctx.saved_tensors
        known = ctx.local.routes
        backward = keeping_subnormals(portable.combine_backward)
        into_rows, own = backward(grad, rows, weights, known.places, known.tokens)
        return into_rows, ctx.local.tp_group.combine_bits(own), None


class ExpertParallel(nn.Module):
    """Experts down(silu(gate) · up) of a mixture, split over ranks; each rank computes its own for all tokens.

    Args:
        gate_up: The weights of gate and up of all experts, gate first. # [E, 2·I, H]
        down: The weights of down of all experts. # [E, H, I]
        mesh: A mesh of one axis, a process group, or None for one rank alone.
        tokens: "replicated" if every rank calls with the same tokens, as tensor-parallel ranks have; "split" if each
            has its own, as data-parallel ranks have. Split tokens are exchanged by all-to-all.

    Raises:
        CutError: The number of ranks does not divide the experts; for replicated tokens, their segments: the largest
            power of two, at most 8, that divides their number.
        ArgumentError: `tokens` is another word.

    Example:
        On one rank it is the whole mixture; under `torchrun`, pass `mesh["ep"]`.

        >>> import torch
        >>> import isobit
        >>> experts = isobit.parallel.ExpertParallel(torch.randn(4, 12, 8), torch.randn(4, 8, 6), None)
        >>> x, logits = torch.randn(5, 8), torch.randn(5, 4)
        >>> experts(x, isobit.route(logits, 2)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        mesh: DeviceMesh | TensorParallelGroup | None,
        *,
        tokens: str = "replicated",
    ) -> None:
        """Keep this rank's experts."""
        super().__init__()
        if tokens not in ("replicated", "split"):
            raise ArgumentError(
                expected="tokens='replicated' or 'split'",
                received=repr(tokens),
                remedy="pass 'split' if each rank of the mesh has tokens of its own",
            )
        self.gate_up = nn.Parameter(gate_up.detach().clone())
        self.down = nn.Parameter(down.detach().clone())
        self.total, self.tokens = len(gate_up), tokens
        tp_group = TensorParallelGroup.of(mesh)
        if tokens == "split":
            check_count(self.total, tp_group)
            split_experts(self, ["gate_up", "down"], tp_group)
            return
        segments = portable.segments_of(self.total)
        if segments % tp_group.size:
            raise CutError(
                expected=f"a number of ranks that divides the {segments} segments of {self.total} experts",
                received=f"{tp_group.size} ranks",
                remedy=f"use 1 to {segments} ranks, a power of two",
            )
        split_module(self, {"gate_up": 0, "down": 0}, tp_group)

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """Return the outputs [T, H] of tokens x [..., H] by their routes."""
        check_tensors(x=x, gate_up=self.gate_up, down=self.down)
        tp_group = tp_group_of(self)
        assert tp_group is not None
        if self.tokens == "split":
            return mix_experts(x, routes, self._compute, tp_group)
        local = local_routes(routes, tp_group)
        rows: Tensor = Dispatch.apply(x, local)  # type: ignore[no-untyped-call]
        made = self._compute(rows, local.routes)
        y: Tensor = Combine.apply(made, routes.weights, local)  # type: ignore[no-untyped-call]
        return y

    def _compute(self, rows: Tensor, routes: Routes) -> Tensor:
        """Return the outputs of this rank's experts, [R, H]."""
        gate, up = grouped_linear(rows, self.gate_up, routes=routes).chunk(2, dim=-1)
        return grouped_linear(swiglu(gate, up), self.down, routes=routes)
