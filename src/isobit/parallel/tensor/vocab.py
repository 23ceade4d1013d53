"""A vocabulary that is split over ranks: its embedding, its logits, and log-probabilities over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit.errors import ArgumentError
from isobit.foundation import launches
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.embedding import partial as embedding_partial
from isobit.ops.embedding.op import NO_PADDING, check_embedding
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.linear import partial as linear_partial
from isobit.ops.linear.op import check_linear, linear_fp32
from isobit.ops.logprob import partial as logprob_partial
from isobit.ops.logprob.loss import count_active
from isobit.ops.logprob.op import IGNORED, check_targets
from isobit.ops.portable.samples import check_rows, spans_of
from isobit.ops.portable.sums import round_once
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.shard import Shard, split_module, tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import (
    TensorParallelGroup,
    samples_of,
    weight_grad,
)

# The vocabulary-parallel embedding: each rank has a run of the table's rows.


def vocab_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute `isobit.embedding` of a table whose rows are split over ranks.

    Nothing is added over the vocabulary, so P need not be a power of two.

    Args:
        ids: Rows of the whole table, on every rank. # [...]
        weight: This rank's rows. # [V/P, H]
        tp_group: The P ranks.
        samples: Which ids belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T] is B samples.
        padding_idx: A row of the whole table that gets no gradient.

    Returns:
        The whole output, on every rank. # [..., H]

    Raises:
        ArgumentError: An id is not a row of the whole table.
    """
    check_tensors(weight=weight)
    shard = Shard.equal(tp_group, 0, len(weight) * tp_group.size)
    whole = weight.detach().new_empty((1, 1)).expand(shard.full, weight.shape[-1])
    padding = check_embedding(ids, whole, padding_idx)
    check_ids(ids, shard.full)
    known = samples_of(samples, ids.unsqueeze(-1))
    check_rows(known, ids.unsqueeze(-1))
    check_share(known, weight)
    return VocabEmbedding.apply(weight, ids, padding, known, shard, tp_group)  # type: ignore[no-untyped-call,no-any-return]


def check_ids(ids: Tensor, rows: int) -> None:
    """Require ids of existing rows, on every rank alike: another id would give a row of zeros."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise ArgumentError(
            expected=f"ids from 0 to {rows - 1}, the rows of all ranks",
            received=f"ids from {int(ids.min())} to {int(ids.max())}",
            remedy="pass ids of this table's rows",
        )


class VocabEmbedding(torch.autograd.Function):
    """Looks rows up on the rank that has them and combines raw bits; the gradient is local."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        padding: int,
        samples: Samples,
        shard: Shard,
        tp_group: TensorParallelGroup,
    ) -> Tensor:
        """Look up this rank's rows and combine those of all ranks."""
        ctx.save_for_backward(ids)
        ctx.padding, ctx.samples, ctx.shard, ctx.share = padding, samples, shard, share_in_force()
        if launches.is_recording():
            sizes = (ids.numel(), *weight.shape)
            launches.record("embedding", dispatch.executor_of(weight.dtype), weight.dtype, sizes)
        return tp_group.combine_bits(embedding_partial.lookup(ids, weight, shard.offset))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dweight [V/P, H] of this rank's rows."""
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_embedding")()
        shard, padding = ctx.shard, None if ctx.padding == NO_PADDING else ctx.padding
        found = embedding_partial.weight_grad(
            grad, ids, ctx.samples, shard.offset, shard.length, padding_idx=padding
        )
        return as_partial(found, ctx.share), *[None] * 5


class VocabParallelEmbedding(nn.Embedding):
    """An embedding whose V rows are split over P ranks; its output is whole on every rank.

    `num_embeddings` and `padding_idx` stay those of the whole table.

    Args:
        num_embeddings: V, the rows of the whole table.
        embedding_dim: The length of a row.
        padding_idx: A row of the whole table that gets no gradient.
        mesh: A mesh of one axis, a process group, or None for one rank alone.
        device: Of the table.
        dtype: Of the table.

    Example:
        On one rank it is the embedding itself; under `torchrun`, pass `mesh["tp"]`.

        >>> import torch
        >>> from isobit.parallel import VocabParallelEmbedding
        >>> whole = torch.nn.Embedding(16, 8)
        >>> split = VocabParallelEmbedding.from_embedding(whole, mesh=None)
        >>> torch.equal(split(torch.tensor([[3, 5]])), whole(torch.tensor([[3, 5]])))
        True
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh | TensorParallelGroup | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initialize the whole table and keep this rank's rows."""
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.split(TensorParallelGroup.of(mesh))

    @classmethod
    def from_embedding(
        cls, module: nn.Embedding, mesh: DeviceMesh | TensorParallelGroup | None
    ) -> VocabParallelEmbedding:
        """Return this rank's part of a whole embedding, which is not changed."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update({k: v for k, v in module.__dict__.items() if not k.startswith("_")})
        made.weight = module.weight
        made.split(TensorParallelGroup.of(mesh))
        return made

    def split(self, tp_group: TensorParallelGroup) -> None:
        """Keep this rank's rows.

        Raises:
            ArgumentError: The embedding has `max_norm`, `scale_grad_by_freq` or `sparse`.
        """
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise ArgumentError(
                expected="a plain embedding",
                received="max_norm, scale_grad_by_freq or sparse",
                remedy="unset them: they have no order of addition here",
            )
        split_module(self, {"weight": 0}, tp_group)

    def forward(self, input: Tensor, samples: Samples | Tensor | None = None) -> Tensor:
        """Look up ids [...] of the whole table; the output [..., H] is whole on every rank."""
        tp_group = tp_group_of(self)
        assert tp_group is not None
        return vocab_embedding(
            input, self.weight, tp_group=tp_group, samples=samples, padding_idx=self.padding_idx
        )


# Logits over a vocabulary that is split over ranks: computed per rank, then gathered.


def vocab_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Return all logits in unrounded fp32, with the bits of the unsplit layer.

    In the backward, the gradient is first rounded to the dtype of `hidden`.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        tp_group: The P ranks; P must divide the segments of V.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The logits, on every rank. # [..., V]
    """
    cut = Cut(len(weight) * tp_group.size, tp_group.size, tp_group.rank)
    known = samples_of(samples, hidden)
    check_rows(known, hidden)
    check_share(known, weight)
    return VocabLogits.apply(hidden, weight, cut, tp_group, known)  # type: ignore[no-untyped-call,no-any-return]


class VocabLogits(torch.autograd.Function):
    """hidden · weightᵀ as the unrounded fp32 sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cut: Cut,
        tp_group: TensorParallelGroup,
        samples: Samples,
    ) -> Tensor:
        """Compute this rank's logits [..., V/P] and gather all [..., V]."""
        ctx.save_for_backward(hidden, weight)
        ctx.cut, ctx.tp_group, ctx.samples, ctx.share = cut, tp_group, samples, share_in_force()
        return torch.cat(list(tp_group.all_gather(linear_fp32(hidden, weight)).unbind(0)), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sum dhidden [..., K] over ranks; dweight [V/P, K] is local."""
        hidden, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logits")()
        cut, want = ctx.cut, ctx.needs_input_grad
        rounded = grad[..., cut.start : cut.start + cut.length].to(hidden.dtype)
        into_hidden = None
        if want[0]:
            total = linear_partial.input_grad(rounded, weight, cut).values[0]
            ctx.tp_group.all_reduce(total)
            into_hidden = round_once(total, hidden.dtype)
        into_weight = weight_grad(rounded, hidden, ctx.samples, ctx.share) if want[1] else None
        return into_hidden, into_weight, None, None, None


# Log-probabilities and cross-entropy over a vocabulary that is split over ranks.
#
# Each rank reduces its logits to a pair (max, sum of exponentials) per token; the pairs are gathered.


def vocab_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: TensorParallelGroup,
    temperature: float = 1.0,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.linear_logprob` of a weight that is split over ranks, with the unsplit bits.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        targets: Tokens of the whole vocabulary, on every rank. # [...]
        tp_group: The P ranks; P must divide the segments of V.
        temperature: Divides the logits.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The log-probability of each target in fp32, on every rank. # [...]
    """
    check_tensors(hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    cut = Cut(len(weight) * tp_group.size, tp_group.size, tp_group.rank)
    check_targets(hidden, cut.extent, targets)
    known = samples_of(samples, hidden)
    check_share(known, weight)
    rows, chosen = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1).to(torch.int64).contiguous(),
    )
    spans = spans_of(known, hidden)
    found: Tensor = VocabLogprob.apply(
        rows, weight, chosen, spans, temperature, cut, known.of, tp_group
    )  # type: ignore[no-untyped-call]
    return found.reshape(targets.shape)


class VocabLogprob(torch.autograd.Function):
    """Gathers the pairs of all ranks; sums dhidden over ranks; dweight is local."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        spans: Tensor,
        temperature: float,
        cut: Cut,
        of: int,
        tp_group: TensorParallelGroup,
    ) -> Tensor:
        """Reduce this rank's logits to pairs [T, 2], gather and merge those of all ranks."""
        pairs, chosen = logprob_partial.forward(hidden, weight, targets, temperature, cut)
        if launches.is_recording():
            sizes = (targets.numel(), *reversed(weight.shape))
            launches.record(
                "linear_logprob", dispatch.executor_of(hidden.dtype), hidden.dtype, sizes
            )
        held = tp_group.all_gather(torch.cat([pairs, chosen.unsqueeze(1)], 1))  # [P, T, 3]
        owner = targets.clamp(min=0) // cut.length  # the rank that has the target's logit
        of_target = held[:, :, 2].gather(0, owner.unsqueeze(0)).squeeze(0)
        found, stats = logprob_partial.finish(
            logprob_partial.merge(held[:, :, :2]), of_target, targets
        )
        ctx.save_for_backward(hidden, weight, targets, stats, spans)
        ctx.temperature, ctx.cut, ctx.of, ctx.tp_group = temperature, cut, of, tp_group
        ctx.share = share_in_force()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sum dhidden [T, K] over ranks; dweight [V/P, K] is local."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logprob")()
        want = ctx.needs_input_grad[:2]
        given = (grad, *ctx.saved_tensors, ctx.temperature, ctx.cut, ctx.of)
        total, into_weight = logprob_partial.backward(
            *given, want_hidden=want[0], want_weight=want[1]
        )
        into_hidden = None
        if want[0]:
            ctx.tp_group.all_reduce(total)
            into_hidden = round_once(total, ctx.saved_tensors[0].dtype)
        return into_hidden, as_partial(into_weight, ctx.share) if want[1] else None, *[None] * 6


def vocab_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: TensorParallelGroup,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.linear_cross_entropy` of a weight that is split over ranks.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        targets: Tokens of the whole vocabulary, on every rank. # [...]
        tp_group: The P ranks; P must divide the segments of V.
        temperature: Divides the logits.
        ignore_index: Targets that have no loss.
        num_items: What the sum is divided by; None is the number of active targets.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The loss, on every rank.
    """
    chosen, active = count_active(targets, ignore_index, num_items)
    found = vocab_logprob(
        hidden, weight, chosen, tp_group=tp_group, temperature=temperature, samples=samples
    )
    return exact_sum(found) / -active
