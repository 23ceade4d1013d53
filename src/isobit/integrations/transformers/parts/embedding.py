"""The embedding of token ids, with a scale where the model has one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from isobit.integrations.transformers.layout import current_layout
from isobit.integrations.transformers.refusals import check_embedding
from isobit.nn.linear import read_weight
from isobit.ops.embedding.op import embedding
from isobit.parallel.tensor.shard import tp_group_of
from isobit.parallel.tensor.vocab_embedding import vocab_embedding


def forward_embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up rows of the table; their gradient is a sum over the samples' tokens."""
    check_embedding("the embedding", module)
    samples, tp_group = current_layout().samples, tp_group_of(module)
    if tp_group is not None:
        return vocab_embedding(
            ids, module.weight, tp_group=tp_group, samples=samples, padding_idx=module.padding_idx
        )
    read = read_weight(module)
    return embedding(ids, read.weight, samples=samples, padding_idx=module.padding_idx)


def forward_scaled_embedding(scale: str, module: Any, ids: Tensor) -> Tensor:
    """Look up rows, and multiply them by the module's tensor of that name, rounded to their dtype."""
    rows = forward_embedding(module, ids)
    factor: Tensor = getattr(module, scale)
    return rows * factor.to(module.weight.dtype)
