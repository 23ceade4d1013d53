"""The portable executor of the embedding: the lookup, and the dense gradient of the table leaf by leaf."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, cases_for, wide_values
from isobit.ops.portable.sums import merge_segments, round_once, widen_rows
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


# Compare an executor's embedding with the portable one, bit for bit on ids that repeat.

# (lengths, H): one sample of two leaves; several segments, one empty; three samples in one segment.
CASES = (((270,), 17), ((9, 0, 20, 30), 3), ((9, 30, 20), 3))
GPU_CASES = (((9, 0, 270, 30), 17), ((9, 30, 20), 17))
VOCABULARY, PADDING = 5, 3


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for lengths, n in cases_for(call, CASES, GPU_CASES):
        generator = torch.Generator().manual_seed(n)
        samples = Samples.packed(lengths)
        ids = torch.randint(0, VOCABULARY, (samples.rows,), generator=generator)
        weight = wide_values((VOCABULARY, n), dtype, generator)
        grad = wide_values((samples.rows, n), dtype, generator)
        spans = torch.tensor(samples.spans)
        y = call("embedding", ids, weight, spans, PADDING)
        given = call("embedding_weight_grad", grad, ids, spans, VOCABULARY, PADDING)
        expected = embedding_weight_grad(grad, ids, samples, VOCABULARY, PADDING)
        if not (bits.equal(y, embedding(ids, weight)) and bits.equal(given, expected)):
            return f"embedding of samples of {list(lengths)}"
    return None
