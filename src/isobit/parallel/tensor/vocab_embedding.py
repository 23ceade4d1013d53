"""The vocabulary-parallel embedding: each rank has a run of the table's rows."""

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
from isobit.ops.embedding import partial
from isobit.ops.embedding.op import NO_PADDING, check_embedding
from isobit.ops.portable.samples import check_rows
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.shard import Shard, split_module, tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


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
        return tp_group.combine_bits(partial.lookup(ids, weight, shard.offset))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dweight [V/P, H] of this rank's rows."""
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_embedding")()
        shard, padding = ctx.shard, None if ctx.padding == NO_PADDING else ctx.padding
        found = partial.weight_grad(
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
