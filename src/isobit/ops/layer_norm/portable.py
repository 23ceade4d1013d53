"""The layer norm's portable executor: the same operations and the same order in plain torch operations."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.linear.portable import round_once, widen
from isobit.ops.rms_norm.portable import input_grad, mean_last, scale_of, sum_samples
from isobit.ops.share import gradient_dtype
from isobit.order.samples import Samples


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, means, scales): the variance is the mean of squares of what is left after the mean is taken away."""
    rows = widen(x)
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
    """(dx, dweight, dbias), the last two unrounded where the samples are a share."""
    column, rows = scales.reshape(-1, 1), widen(grad)
    normal, weighted = (widen(x) - means.reshape(-1, 1)) * column, rows * weight.to(rows.dtype)
    dx = input_grad(weighted, normal, column, mean_last(weighted))
    sums = sum_samples(rows * normal, samples), sum_samples(rows, samples)
    dtype = gradient_dtype(x.dtype, len(samples.spans), samples.of)
    return (
        round_once(dx, x.dtype).reshape(x.shape),
        round_once(sums[0], dtype),
        round_once(sums[1], dtype),
    )
