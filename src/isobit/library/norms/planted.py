"""Planted wrong norms whose parameter gradients are summed in other ways; y and dx are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from isobit.library.gradients import with_backward
from isobit.library.norms.claims import EPS, backward_of, forward_of
from isobit.library.placements import is_real, rows_of
from isobit.library.subjects import Subject
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import sum_samples
from isobit.ops.rms_norm import portable as rms_portable
from isobit.order.samples import Samples

Sums = Callable[[Tensor, Samples, int], Tensor]  # (terms, samples, heads) -> the sum


def with_sums(sums: Sums) -> Subject:
    """Return a subject of either norm's contract whose parameter gradients are added by `sums`."""

    def norm(
        x: Tensor,
        *parameters: Tensor,
        eps: float = EPS,
        samples: Samples | None = None,
        heads: bool = False,
    ) -> Tensor:
        described = samples or whole_samples(x.select(-2, 0) if heads else x, None)
        count = x.shape[-2] if heads else 0

        def backward(grad: Tensor, x: Tensor, *given: Tensor) -> Any:
            _, means, scales = forward_of(x, given, eps)
            dx, *_ = backward_of(grad, x, given, (means, scales), described, count)
            rows, grads = (t.reshape(-1, x.shape[-1]).float() for t in (x, grad))
            normal = (rows - means.reshape(-1, 1)) * scales.reshape(-1, 1)
            terms = [grads * normal, grads][: len(given)]
            return dx, *(sums(t, described, count).to(x.dtype) for t in terms)

        return with_backward(
            lambda x, *given: forward_of(x, given, eps)[0], backward, x, *parameters
        )

    return norm


def tokens_of(terms: Tensor, heads: int) -> Tensor:
    """Return the terms as [tokens, heads, n]."""
    return terms.view(-1, max(heads, 1), terms.shape[1])


def real_rows(terms: Tensor, described: Samples, heads: int) -> Tensor:
    """Return the terms of real tokens, [tokens, heads, n], in the order of the samples."""
    return tokens_of(terms, heads)[rows_of(described)]


def chain_of(rows: Tensor) -> Tensor:
    """Return one running sum over the first axis, rounded at every step."""
    return reduce(torch.add, rows, torch.zeros_like(rows[0]))


def _one_chain(terms: Tensor, described: Samples, heads: int) -> Tensor:
    return chain_of(real_rows(terms, described, heads).flatten(0, 1))


def _heads_first(terms: Tensor, described: Samples, heads: int) -> Tensor:
    return sum_samples(tokens_of(terms, heads).sum(1), described)


def _anchored(terms: Tensor, described: Samples, heads: int) -> Tensor:
    """Count leaves from the padded start of each row of the batch."""
    masked = torch.where(is_real(described)[:, None, None], tokens_of(terms, heads), 0.0).flatten(1)
    count = max(len(described.spans), 1)
    width = described.rows // count
    grid = Samples.packed([*[width] * (count - 1), described.rows - width * (count - 1)])
    return rms_portable.sum_heads(masked.reshape(-1, terms.shape[1]), grid, max(heads, 1))


padding_counted = with_sums(lambda terms, described, heads: tokens_of(terms, heads).sum((0, 1)))
one_chain, heads_before_samples = with_sums(_one_chain), with_sums(_heads_first)
bf16_sums = with_sums(lambda terms, *given: _one_chain(terms.bfloat16(), *given))
leaves_at_padding = with_sums(_anchored)
