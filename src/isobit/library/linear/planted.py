"""Planted wrong linear layers, which the claims of matmul-kernel-v1 must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from isobit.library.linear.implementations import OURS, Share, share_of
from isobit.library.placements import is_real, rows_of
from isobit.ops.linear import partial
from isobit.ops.linear.op import linear
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples


def segments_of(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Return every segment of y by itself, in fp32."""
    count = FeaturePlan(x.shape[-1]).count
    cuts = [Cut(x.shape[-1], count, i) for i in range(count)]
    return [partial.output(share_of(x, c), share_of(weight, c), c).values[0] for c in cuts]


def with_bias(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the bias and round."""
    return (total if bias is None else total + bias.float()).to(dtype)


def split_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Split K where there are more than 16 rows."""
    if x.shape[0] <= 16:
        return linear(x, weight, bias)
    third = x.shape[-1] // 3
    total = linear(x[:, :third].float(), weight[:, :third].float())
    total = total + linear(x[:, third:].float(), weight[:, third:].float())
    return with_bias(total, bias, x.dtype)


def sizes_exchanged(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch with k and n exchanged: the same three numbers, of another problem."""
    linear(x.new_zeros(len(x), len(weight)), weight.T.contiguous())
    return x.new_zeros(len(x), len(weight))


def narrow_merges(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Round segments to bf16 before they are merged."""
    total = segments_of(x, weight)[0]
    for segment in segments_of(x, weight)[1:]:
        total = (total.bfloat16() + segment.bfloat16()).float()
    return with_bias(total, bias, x.dtype)


def left_fold(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Fold segments from the left instead of merging by the tree."""
    return with_bias(reduce(torch.add, segments_of(x, weight)), bias, x.dtype)


def reordered_tail(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum the columns after the last whole panel of 64 backwards."""
    whole = weight.shape[0] // 64 * 64
    body = linear(x, weight[:whole], None)
    tail = linear(x.flip(-1), weight[whole:].flip(-1), None)
    y = torch.cat([body, tail], -1)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


def swapped_square(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Exchange K and N, which only a square weight allows."""
    return linear(x, weight.t() if weight.shape[0] == weight.shape[1] else weight, bias)


def anchored_at_padding(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Count leaves from the padded start of each row of the batch; padding is zero."""
    real = is_real(samples).unsqueeze(1)
    width = samples.rows // max(len(samples.spans), 1)
    if sum(length for _, length in samples.spans) == samples.rows:  # packed: nothing is padded
        return OURS.parameter_grads(grad, x, samples)
    grid = Samples.packed([width] * len(samples.spans))
    return OURS.parameter_grads(torch.where(real, grad, 0), torch.where(real, x, 0), grid)


def in_call_order(shares: Sequence[Share]) -> tuple[Tensor, Tensor]:
    """Add micro-batch gradients one after another, as autograd does."""
    found = [
        (partial.weight_grad(*share).values, partial.bias_grad(share[0], share[2]).values)
        for share in shares
    ]
    dtype = shares[0][0].dtype
    weight, bias = (torch.cat(list(values)) for values in zip(*found, strict=True))
    return reduce(torch.add, weight).to(dtype), reduce(torch.add, bias).to(dtype)


def reversed_tokens(grad: Tensor, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Reverse the rows of every sample: the right sum, in another order."""
    lengths = [length for _, length in samples.spans]
    order = torch.cat([run.flip(0) for run in torch.split(rows_of(samples), lengths)])
    return OURS.parameter_grads(grad[order], x[order], Samples.packed(lengths))


def stale_decoder(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Copy the weight once, and never again."""
    kept = layer.weight.detach().clone()
    return lambda x: linear(x, kept)


def shifted_cut(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Merge ranks by a ring that starts at rank 1."""
    pieces = list(zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True))
    sums = [partial.output(*p, Cut(x.shape[-1], parts, i)).values[0] for i, p in enumerate(pieces)]
    return reduce(torch.add, [*sums[1:], sums[0]]).to(x.dtype)


split_k_by_rows = replace(OURS, output=split_by_rows)
tail_reordered = replace(OURS, output=reordered_tail)
bf16_merges = replace(OURS, output=narrow_merges)
folded_segments = replace(OURS, output=left_fold)
ring_of_ranks = replace(OURS, cut_output=shifted_cut)
leaf_at_padding = replace(OURS, parameter_grads=anchored_at_padding)
summed_in_call_order = replace(OURS, accumulate=in_call_order)
samples_reversed = replace(OURS, parameter_grads=reversed_tokens)
axes_swapped_where_square = replace(OURS, output=swapped_square)
axes_swapped = replace(OURS, output=lambda x, weight, bias=None: linear(x, weight, bias).t())
stale_packed_weight = replace(OURS, decoder=stale_decoder)
