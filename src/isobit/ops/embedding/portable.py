"""The embedding's portable executor: its gradient by the dense definition, leaf by leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import merge_segments, round_once, widen
from isobit.ops.share import gradient_dtype
from isobit.order.plan import Leaf
from isobit.order.samples import Samples


def embedding_weight_grad(
    grad: Tensor, ids: Tensor, samples: Samples, vocabulary: int, padding: int
) -> Tensor:
    """Σ over the tokens of each id: a leaf folds its tokens left from +0; a leaf, or a sample, without the id adds +0.

    Only rows that occur are summed; all others are +0. Unrounded where the samples are a share.
    """
    rows, flat = widen(grad), ids.reshape(-1).long()
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
    return round_once(table, gradient_dtype(grad.dtype, len(samples.spans), samples.of))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of the table, as they are."""
    return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
