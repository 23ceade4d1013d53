"""The portable executor of LayerNorm: the same operations and the same order in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, cases_for, spans_and_samples, wide_values
from isobit.ops.portable.norms import input_grad, scale_of
from isobit.ops.portable.sums import mean_last, round_once, sum_samples, widen_rows
from isobit.ops.share import gradient_dtype
from isobit.order.samples import Samples


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, means, scales): the mean first, then the variance as the mean square of x − mean."""
    rows = widen_rows(x)
    means = mean_last(rows)
    scales = scale_of(rows - means, eps)
    y = ((rows - means) * scales) * weight.to(rows.dtype)
    if bias is not None:
        y = y + bias.to(rows.dtype)
    return (
        round_once(y, x.dtype).reshape(x.shape),
        means.reshape(x.shape[:-1]),
        scales.reshape(x.shape[:-1]),
    )


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, means: Tensor, scales: Tensor, samples: Samples
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias); the last two are not rounded where the samples are a share."""
    column, rows = scales.reshape(-1, 1), widen_rows(grad)
    normal, weighted = (widen_rows(x) - means.reshape(-1, 1)) * column, rows * weight.to(rows.dtype)
    dx = input_grad(weighted, normal, column, mean_last(weighted))
    sums = sum_samples(rows * normal, samples), sum_samples(rows, samples)
    dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
    return (
        round_once(dx, x.dtype).reshape(x.shape),
        round_once(sums[0], dtype),
        round_once(sums[1], dtype),
    )


# Compare an executor's LayerNorm with the portable one, bit for bit on hard rows.

# (tokens, n): two leaves of tokens and a tail alone; one long segment of features.
CASES = ((270, 7), (3, 1025))
GPU_CASES = ((270, 2056),)
EPS = 1e-5


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for tokens, n in cases_for(call, CASES, GPU_CASES):
        generator = torch.Generator().manual_seed(n)
        x, grad = (wide_values((tokens, n), dtype, generator) for _ in range(2))
        weight, bias = (wide_values((n,), dtype, generator) for _ in range(2))
        spans, samples = spans_and_samples(tokens)
        found = call("layer_norm", x, weight, bias, EPS, spans)
        given = call("layer_norm_backward", grad, x, weight, *found[1:], spans)
        expected = layer_norm(x, weight, bias, EPS)
        gradients = layer_norm_backward(grad, x, weight, *expected[1:], samples)
        if not all(
            bits.equal(a, b) for a, b in zip((*found, *given), (*expected, *gradients), strict=True)
        ):
            return f"layer_norm of {[tokens, n]}"
    return None
