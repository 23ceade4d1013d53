"""The norms' portable executor: the same operations and the same order in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import round_once, sum_rows, widen
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
    column, rows = scales.reshape(-1, 1), widen(grad)
    normal = widen(x) * column
    dx = input_grad(rows * weight.to(rows.dtype), normal, column, None)
    terms = rows * normal
    total = sum_heads(terms, samples, heads) if heads else sum_samples(terms, samples)
    return round_once(dx, x.dtype).reshape(x.shape), round_once(total, x.dtype)


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


def sum_heads(terms: Tensor, samples: Samples, heads: int) -> Tensor:
    """[n] of terms [tokens · heads, n]: a head's tokens by themselves, a sample's heads, then the samples."""
    n, totals = terms.shape[1], []
    tokens = terms.reshape(-1, heads * n)
    for start, length in samples.spans:
        (total,) = sum_rows([cut_into_leaves(start, length, TOKEN_LEAF, False)], tokens)
        totals.append(merge_items(list(total.reshape(heads, n)), FEATURE_CAP, torch.add))
    return merge_items(totals, SAMPLE_CAP, torch.add) if totals else terms.new_zeros(n)
