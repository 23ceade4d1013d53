"""Attention of one sequence over several ranks (context parallelism), with the bits of one rank.

[Note: attention over ranks]
Forward: each rank computes its own queries against all keys up to them. A query's fold over blocks and chunks of keys
is the one of [Note: chunks of keys] (ops/attention/portable.py), which does not depend on other queries.

Backward: dq folds blocks of keys from left to right, dk and dv fold blocks of queries, over the whole sequence. A sum
over one rank's queries is no subtree of that fold, so ranks cannot add theirs; but heads are independent of each other.
So each rank computes the gradients of its own key heads, with their queries, over the whole sequence. If there are more
ranks than key heads, some ranks have none.

Nothing is added between ranks: raw bits are gathered.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.ops.arguments import check_tensors
from isobit.ops.attention.op import BlockTable, Places, attend, check_attention, mask_of
from isobit.ops.attention.portable import Mask
from isobit.ops.derivatives import refuse_second_order
from isobit.order.samples import Samples
from isobit.parallel.same_environment import require_same_arithmetic
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | TensorParallelGroup | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute `isobit.attention` of sequences whose tokens are split over ranks, in rank order.

    Args:
        q: Queries of this rank's tokens, [B, T, H, D]: as many tokens on each rank.
        k: Their keys, [B, T, H_kv, D].
        v: Their values, in the shape of k.
        mesh: A mesh of one axis, a process group, or None for one rank alone.
        is_causal: See `isobit.attention`, also for the options below.
        scale: Factor of the scores.
        window: The number of keys that a query sees.

    Returns:
        The outputs of this rank's tokens, [B, T, H, D]: those rows of attention on one rank, and so are the gradients.

    Raises:
        CutError: Ranks have different shapes.
        ArgumentError: Shapes, dtypes or options do not fit together.

    Example:
        >>> import isobit
        >>> q, k, v = (torch.randn(1, 70, 2, 16) for _ in range(3))
        >>> y = isobit.parallel.context_attention(q, k, v, None, is_causal=True)
        >>> torch.equal(y, isobit.attention(q, k, v, is_causal=True))
        True
    """
    check_tensors(q=q, k=k, v=v)
    check_attention(q, k, v)
    if window is not None and (window < 1 or not is_causal):
        raise ArgumentError(
            expected="a window of one key or more, in causal attention",
            received=f"window={window}, is_causal={is_causal}",
            remedy="leave window out, or count the keys a query sees, itself included",
        )
    ranks = TensorParallelGroup.of(mesh)
    check_shapes(q, k, ranks)
    q, k, v = (Gather.apply(t, ranks) for t in (q, k, v))  # type: ignore[no-untyped-call]
    mask = mask_of(q, is_causal, scale, window)
    whole = SplitPlaces(q, k, None, None, ranks).attend(q, k, v, mask)
    mixed: Tensor = Take.apply(whole, ranks)  # type: ignore[no-untyped-call]
    return mixed


def check_shapes(q: Tensor, k: Tensor, ranks: TensorParallelGroup) -> None:
    """Raise on every rank unless q and k have four axes and the same shapes on all."""
    if ranks.size == 1:
        return
    require_same_arithmetic(q.dtype, ranks.group)
    facts = [*q.shape, *k.shape, q.element_size()]
    told = ranks.all_gather(torch.tensor((facts + [-1] * 16)[:16], dtype=torch.int64)).tolist()
    if q.dim() != 4 or q.shape[:2] != k.shape[:2] or any(each != told[0] for each in told):
        raise CutError(
            expected="q [B, T, H, D] and k [B, T, H_kv, D] of the same shapes on all ranks",
            received=f"q {list(q.shape)} and k {list(k.shape)} on rank {ranks.rank}",
            remedy="pad the sequences on the right to a multiple of the number of ranks: causal queries do not see it",
        )


class SplitPlaces(Places):
    """Places of samples whose attention several ranks compute: each a part, and each gets the whole."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        queries: Samples | None,
        keys: Samples | None,
        ranks: TensorParallelGroup,
    ) -> None:
        """Make the tables, as for one rank."""
        super().__init__(q, k, queries, keys)
        self.ranks = ranks

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Compute attention of tensors that every rank has."""
        if self.ranks.size == 1:
            return super().attend(q, k, v, mask)
        if mask.window and not mask.causal:  # a query's position would be that of one rank's
            raise UnsupportedError(
                expected="a causal window, where ranks share attention",
                received=f"a window of {mask.window} keys on both sides",
                remedy="compute it on one rank",
            )
        rows = [t.flatten(0, -3) for t in (q, k, v)] if self.crosses else [q, k, v]
        mixed: Tensor = SplitAttention.apply(*rows, self, mask, self.ranks)  # type: ignore[no-untyped-call]
        return mixed.view(q.shape)


class SplitAttention(torch.autograd.Function):
    """Computes this rank's queries in forward, and its key heads in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        places: Places,
        mask: Mask,
        ranks: TensorParallelGroup,
    ) -> Tensor:
        """Return the outputs of all queries."""
        ctx.save_for_backward(q, k, v)
        ctx.how = places, mask, ranks
        spans, table = own_queries(places, mask, ranks)
        mixed = attend(q, k, v, spans, table, mask)
        own = torch.zeros(q.shape[:-2].numel(), dtype=torch.bool)
        for start, rows in spans.tolist():
            own[start : start + rows] = True
        mine = torch.where(own.view(*q.shape[:-2], 1, 1), mixed, 0.0)
        return ranks.combine_bits(mine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dq, dk and dv of all tokens."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.context_attention")()
        places, mask, ranks = ctx.how
        saved = ctx.saved_tensors  # once: a checkpoint computes them again for each access
        found = [torch.zeros_like(t) for t in saved]
        heads = own_heads(saved[1].shape[-2], ranks)
        if heads is not None:
            group = found[0].shape[-2] // found[1].shape[-2]
            of_queries = slice(heads.start * group, heads.stop * group)
            cuts = of_queries, heads, heads
            held = [
                t.detach()[..., cut, :].contiguous().requires_grad_()
                for t, cut in zip(saved, cuts, strict=True)
            ]
            with torch.enable_grad():
                q, k, v = held
                mixed = attend(q, k, v, places.spans, places.table, mask)
            made = torch.autograd.grad(mixed, held, grad[..., of_queries, :].contiguous())
            for whole, cut, part in zip(found, cuts, made, strict=True):
                whole[..., cut, :] = part
        return *(ranks.combine_bits(t) for t in found), None, None, None


def own_queries(
    places: Places, mask: Mask, ranks: TensorParallelGroup
) -> tuple[Tensor, BlockTable]:
    """Return the spans of this rank's queries, and the keys up to the last of them."""
    spans, lengths = places.spans.clone(), places.table.lengths.clone()
    rows = spans[:, 1].clone()
    first, stop = rows * ranks.rank // ranks.size, rows * (ranks.rank + 1) // ranks.size
    spans[:, 0] += first
    spans[:, 1] = stop - first
    if mask.causal:  # the position of a query is that of the last key, counted back
        lengths -= rows - stop
    table = BlockTable.__new__(BlockTable)
    table.starts, table.lengths = places.table.starts, lengths
    return spans, table


def own_heads(count: int, ranks: TensorParallelGroup) -> slice | None:
    """Return the key heads whose gradients this rank computes, if there are any."""
    parts = math.gcd(count, ranks.size)
    if ranks.rank >= parts:
        return None
    each = count // parts
    return slice(ranks.rank * each, (ranks.rank + 1) * each)


def gather_tokens(local: Tensor, ranks: TensorParallelGroup) -> Tensor:
    """Return the tokens of all ranks, in rank order, along axis 1."""
    raw = local.detach().contiguous().view(torch.uint8)
    return torch.cat(list(ranks.all_gather(raw).unbind(0)), 1).view(local.dtype)


def own_tokens(whole: Tensor, ranks: TensorParallelGroup) -> Tensor:
    """Return this rank's tokens."""
    count = whole.shape[1] // ranks.size
    return whole[:, ranks.rank * count : (ranks.rank + 1) * count].contiguous()


class Gather(torch.autograd.Function):
    """Gives every rank all tokens; each rank has the whole gradient, and keeps that of its own."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, ranks: TensorParallelGroup) -> Tensor:
        """Return the tokens of all ranks."""
        ctx.ranks = ranks
        return gather_tokens(local, ranks) if ranks.size > 1 else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's tokens."""
        return own_tokens(grad, ctx.ranks), None


class Take(torch.autograd.Function):
    """Keeps this rank's tokens; their gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorParallelGroup) -> Tensor:
        """Return this rank's tokens."""
        ctx.ranks = ranks
        return own_tokens(whole, ranks) if ranks.size > 1 else whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return gather_tokens(grad, ctx.ranks) if ctx.ranks.size > 1 else grad, None
