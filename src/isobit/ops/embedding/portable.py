"""The portable executor of the embedding: the lookup, and the dense gradient of the table leaf by leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.rounding import round_once, widen_rows
from isobit.ops.portable.sums import merge_segments
from isobit.ops.share import gradient_dtype
from isobit.order.plan import Leaf
from isobit.order.samples import Samples


def embedding_weight_grad(
    grad: Tensor, ids: Tensor, samples: Samples, vocabulary: int, padding: int
) -> Tensor:
    """Return the sums over the tokens of each id, [V, H].

    A leaf adds its tokens from left to right, starting with +0; a leaf or sample without the id adds +0. Only rows that
    occur are summed, all others are +0. The result is not rounded where the samples are a share.
    """
    rows, flat = widen_rows(grad), ids.reshape(-1).long()
    present, places = torch.unique(flat, return_inverse=True)

    def sum_leaf(leaf: Leaf) -> Tensor:
        total = rows.new_zeros(len(present), rows.shape[1])
        for token in range(leaf.start, leaf.start + leaf.length):
            total[places[token]] += rows[token]
        return total

    table = rows.new_zeros(vocabulary, rows.shape[1])
    for total in merge_segments(samples.segments, sum_leaf, 0):
        table[present] = total
    if padding >= 0:
        table[padding] = 0
    return round_once(table, gradient_dtype(grad.dtype, len(samples.spans), samples.total))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of the table that ids name."""
    return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
