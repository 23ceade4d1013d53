"""The portable executor of the linear layer: forward, and the gradients of input, weight and bias."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.portable.sums import round_once, sum_products, sum_rows, widen_rows
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return [rows, N], the sums over K in the accumulation dtype, before bias and rounding."""
    return sum_products(FeaturePlan(x.shape[-1]).products, widen_rows(x), widen_rows(weight))[0]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [..., N]: the sum over K, then the bias, then one rounding."""
    total = linear_fp32(x, weight)
    if bias is not None:
        total = total + bias.to(total.dtype)
    return round_once(total, x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """Return dX [..., K], summed over N."""
    segments = FeaturePlan(grad.shape[-1]).products
    total = sum_products(segments, widen_rows(grad), widen_rows(weight).t())[0]
    return round_once(total, grad.dtype).reshape(*grad.shape[:-1], weight.shape[1])


def weight_grad(grad: Tensor, x: Tensor, samples: Samples) -> Tensor:
    """Return dW [N, K], summed over the samples."""
    roots = sum_products(samples.segments, widen_rows(grad).t(), widen_rows(x).t())
    return only_root(roots, x.dtype, samples)


def bias_grad(grad: Tensor, samples: Samples) -> Tensor:
    """Return db [N], summed over the samples."""
    return only_root(sum_rows(samples.segments, widen_rows(grad)), grad.dtype, samples)


def only_root(roots: Tensor, dtype: torch.dtype, samples: Samples) -> Tensor:
    """Return the one root: rounded for a whole batch, fp32 for a share, zero where there is no sample."""
    total = roots[0] if len(roots) else roots.sum(0)
    return round_once(total, gradient_dtype(dtype, len(samples.spans), samples.of))
