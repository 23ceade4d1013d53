"""The portable executor of LayerNorm: the same operations and the same order in plain torch operations."""

from __future__ import annotations

from torch import Tensor

from isobit.ops.portable.norms import input_grad, scale_of
from isobit.ops.portable.rounding import round_once, widen_rows
from isobit.ops.portable.sums import mean_last, sum_samples
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
