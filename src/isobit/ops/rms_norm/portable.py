"""The norms' portable executor: the same operations and the same order in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import one_nan, round_once, sum_rows, widen
from isobit.ops.share import gradient_dtype
from isobit.ops.softmax.portable import sum_last
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, TOKEN_LEAF, cut_into_leaves
from isobit.order.samples import Samples
from isobit.order.tree import merge_items


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, scales): scale = 1 / sqrt(Σ x² / n + eps), y = (x · scale) · weight."""
    rows = widen(x)
    scales = scale_of(rows, eps)
    y = (rows * scales) * weight.to(rows.dtype)
    return round_once(y, x.dtype).reshape(x.shape), scales.reshape(x.shape[:-1])


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, samples: Samples, heads: int
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of tokens that have `heads` rows each; 0 where the samples' rows are themselves the tokens."""
    dx, terms = input_grad_and_terms(grad, x, weight, scales)
    total = (
        merge_samples(sum_heads(terms, samples, heads), samples.of)
        if heads
        else sum_samples(terms, samples)
    )
    return dx, round_once(total, gradient_dtype(x.dtype, len(samples.spans), samples.of))


def input_grad_and_terms(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, and the terms [rows, n] of dweight."""
    column, rows = scales.reshape(-1, 1), widen(grad)
    normal = widen(x) * column
    dx = input_grad(rows * weight.to(rows.dtype), normal, column, None)
    return round_once(dx, x.dtype).reshape(x.shape), rows * normal


def mean_last(terms: Tensor) -> Tensor:
    """[R, 1] of terms [R, n]: the sum, then one division."""
    return sum_last(terms) / torch.tensor(terms.shape[1], dtype=terms.dtype)


def scale_of(rows: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps). A root by way of fp64 is the right one, whoever's library takes it."""
    total = mean_last(rows * rows) + torch.tensor(eps, dtype=rows.dtype)
    return torch.ones((), dtype=rows.dtype) / total.double().sqrt().to(rows.dtype)


def input_grad(weighted: Tensor, normal: Tensor, scales: Tensor, level: Tensor | None) -> Tensor:
    """scale · (a − x̂ · mean(a · x̂)), where a centred row takes its level, mean(a), from a first."""
    level_off = weighted if level is None else weighted - level
    return (level_off - normal * mean_last(weighted * normal)) * scales


def sum_samples(terms: Tensor, samples: Samples) -> Tensor:
    """[n] of terms [tokens, n], in the order of the samples."""
    roots = sum_rows(samples.segments, terms)
    return roots[0] if len(roots) else terms.new_zeros(terms.shape[1])


def sum_heads(terms: Tensor, samples: Samples, heads: int, of: int = 0) -> Tensor:
    """[samples, n] of terms [tokens · heads, n]: a head's tokens by themselves, then a sample's heads (of `of`)."""
    totals = terms.new_zeros(len(samples.spans), terms.shape[1])
    tokens = terms.reshape(-1, heads * terms.shape[1])
    for at, (start, length) in enumerate(samples.spans):
        (total,) = sum_rows([cut_into_leaves(start, length, TOKEN_LEAF, False)], tokens)
        totals[at] = one_nan(
            merge_items(list(total.reshape(heads, -1)), FEATURE_CAP, torch.add, of)
        )
    return totals


def merge_samples(totals: Tensor, of: int = 0) -> Tensor:
    """[n] of each sample's totals [samples, n], which are one subtree of `of` samples."""
    if not len(totals):
        return totals.new_zeros(totals.shape[1])
    return one_nan(merge_items(list(totals), SAMPLE_CAP, torch.add, of))
