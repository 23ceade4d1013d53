"""The portable executor of RMSNorm: the same operations and the same order in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.norms import input_grad, scale_of
from isobit.ops.portable.sums import one_nan, round_once, sum_rows, sum_samples, widen_rows
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, cut_into_leaves
from isobit.order.samples import Samples
from isobit.order.tree import merge_items


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, scales): scale = 1 / sqrt(Σ x² / n + eps), y = (x · scale) · weight."""
    rows = widen_rows(x)
    scales = scale_of(rows, eps)
    y = (rows * scales) * weight.to(rows.dtype)
    return round_once(y, x.dtype).reshape(x.shape), scales.reshape(x.shape[:-1])


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor, samples: Samples, heads: int
) -> tuple[Tensor, Tensor]:
    """Return (dx, dweight). Each token has `heads` rows; 0 means that a row is a token."""
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
    """Return dx, and the terms [rows, n] of dweight."""
    column, rows = scales.reshape(-1, 1), widen_rows(grad)
    normal = widen_rows(x) * column
    dx = input_grad(rows * weight.to(rows.dtype), normal, column, None)
    return round_once(dx, x.dtype).reshape(x.shape), rows * normal


def sum_heads(terms: Tensor, samples: Samples, heads: int, of: int = 0) -> Tensor:
    """Return [samples, n], the sums of terms [tokens · heads, n] per sample.

    The tokens of each head are summed separately, then the heads, which are one subtree of `of` heads (0: all heads).
    """
    totals = terms.new_zeros(len(samples.spans), terms.shape[1])
    tokens = terms.reshape(-1, heads * terms.shape[1])
    for at, (start, length) in enumerate(samples.spans):
        (total,) = sum_rows([cut_into_leaves(start, length, False)], tokens)
        totals[at] = one_nan(
            merge_items(list(total.reshape(heads, -1)), FEATURE_CAP, torch.add, of)
        )
    return totals


def merge_samples(totals: Tensor, of: int = 0) -> Tensor:
    """Return [n], the sum of totals [samples, n], which are one subtree of `of` samples (0: all samples)."""
    if not len(totals):
        return totals.new_zeros(totals.shape[1])
    return one_nan(merge_items(list(totals), SAMPLE_CAP, torch.add, of))
