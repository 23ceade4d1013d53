"""The vocabulary-parallel embedding: a rank holds a run of rows, and raw bits are combined, so that −0 survives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobit import launches
from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.embedding import partial
from isobit.ops.embedding.op import NO_PADDING, check_embedding
from isobit.ops.portable.samples import spans_of
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.shard import Ranks, Shard, ranks_of, split_module


def vocab_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    ranks: Ranks,
    samples: Samples | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """isobit.embedding of a table whose rows are spread over ranks: weight [V/P, H] are this rank's, ids [...] global.

    Every rank has the whole output. Nothing is added over the vocabulary, so that any P with equal shares will do.
    """
    check_tensors(weight=weight)
    shard = Shard.equal(ranks, 0, len(weight) * ranks.parts)
    whole = weight.detach().new_empty((1, 1)).expand(shard.full, weight.shape[-1])
    padding = check_embedding(ids, whole, padding_idx)
    check_ids(ids, shard.full)
    known = samples_of(samples, ids.unsqueeze(-1))
    spans_of(known, ids.unsqueeze(-1))
    check_share(known, weight)
    return Embedding.apply(weight, ids, padding, known, shard, ranks)  # type: ignore[no-untyped-call,no-any-return]


def check_ids(ids: Tensor, rows: int) -> None:
    """On every rank alike: a wrong id would otherwise be a row of zeros."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        raise ArgumentError(
            expected=f"ids from 0 to {rows - 1}, the rows of all ranks",
            received=f"ids from {int(ids.min())} to {int(ids.max())}",
            remedy="pass ids of this table's rows",
        )


class Embedding(torch.autograd.Function):
    """The rows are looked up where they are; the table's gradient is local."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        ids: Tensor,
        padding: int,
        samples: Samples,
        shard: Shard,
        ranks: Ranks,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.samples, ctx.shard, ctx.share = padding, samples, shard, share_in_force()
        if launches.is_recording():
            sizes = (ids.numel(), *weight.shape)
            launches.record("embedding", dispatch.is_native(weight.dtype), weight.dtype, sizes)
        return ranks.combine(partial.lookup(ids, weight, shard.offset))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_embedding")()
        shard, padding = ctx.shard, None if ctx.padding == NO_PADDING else ctx.padding
        found = partial.weight_grad(
            grad, ids, ctx.samples, shard.offset, shard.length, padding_idx=padding
        )
        return as_partial(found, ctx.share), *[None] * 5


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank holds V/P rows; its output is whole on every rank."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        mesh: DeviceMesh | Ranks | None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self.split(Ranks.of(mesh))

    @classmethod
    def from_embedding(
        cls, module: nn.Embedding, mesh: DeviceMesh | Ranks | None
    ) -> VocabParallelEmbedding:
        """This rank's part of a whole table, which is left as it is."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__.update({k: v for k, v in module.__dict__.items() if not k.startswith("_")})
        made.weight = module.weight
        made.split(Ranks.of(mesh))
        return made

    def split(self, ranks: Ranks) -> None:
        """Keeps this rank's rows; `num_embeddings` and `padding_idx` stay those of the whole table."""
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            raise ArgumentError(
                expected="a plain embedding",
                received="max_norm, scale_grad_by_freq or sparse",
                remedy="unset them: they have no order of addition here",
            )
        split_module(self, {"weight": 0}, ranks)

    def forward(self, input: Tensor, samples: Samples | None = None) -> Tensor:
        """The rows that ids name; see vocab_embedding."""
        ranks = ranks_of(self)
        assert ranks is not None
        return vocab_embedding(
            input, self.weight, ranks=ranks, samples=samples, padding_idx=self.padding_idx
        )
