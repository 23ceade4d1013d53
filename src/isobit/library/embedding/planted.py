"""Planted wrong embeddings: other sums of the table's gradient, other rows, ids that wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.library import stock as stock_functions
from isobit.library.embedding.claims import Embedded
from isobit.library.gradients import with_backward
from isobit.library.placements import rows_of
from isobit.ops.embedding.op import embedding
from isobit.ops.portable.samples import whole_samples
from isobit.order.samples import Samples

# (a table of zeros, ids, gradients, samples) -> the table's gradient
Sums = Callable[[Tensor, Tensor, Tensor, Samples], Tensor]


def with_sums(sums: Sums) -> Embedded:
    """Return a lookup whose table's gradient is computed by `sums`."""

    def lookup(ids: Tensor, weight: Tensor, *, samples: Any = None, **_: Any) -> Tensor:
        described = samples or whole_samples(ids.unsqueeze(-1), None)

        def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
            rows = grad.reshape(-1, grad.shape[-1]).float()
            found = sums(torch.zeros(weight.shape), ids.reshape(-1).long(), rows, described)
            return (found.to(weight.dtype),)

        return with_backward(lambda weight: weight[ids], backward, weight)

    return Embedded(lookup)


def _chained(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    for token in rows_of(described).tolist():
        zeros[ids[token]] += grad[token]
    return zeros


def _once_each(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    real = rows_of(described)
    zeros[ids[real]] = grad[real]
    return zeros


def _narrow(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    return _chained(zeros.bfloat16(), ids, grad.bfloat16(), described).float()


def _from_the_first(zeros: Tensor, ids: Tensor, grad: Tensor, described: Samples) -> Tensor:
    """Start sums from the first gradient instead of +0, so that the result can be −0."""
    found, real = _chained(zeros, ids, grad, described), rows_of(described)
    negative = torch.full_like(zeros, -0.0)
    return torch.where(
        (found == 0) & (negative.index_add(0, ids[real], grad[real]) == 0), negative, found
    )


stock = Embedded(stock_functions.embedding)
plain_index_add = with_sums(lambda zeros, ids, grad, described: zeros.index_add(0, ids, grad))
one_chain = with_sums(_chained)
duplicates_dropped = with_sums(_once_each)
bf16_sums = with_sums(_narrow)
negative_zeros = with_sums(_from_the_first)
without_padding_idx = Embedded(
    lambda ids, weight, samples=None, **_: embedding(ids, weight, samples=samples)
)
wrapping_ids = Embedded(lambda ids, weight, **_: weight[ids.long() % len(weight)])
off_by_one = Embedded(lambda ids, weight, **_: weight[(ids + 1) % len(weight)])
