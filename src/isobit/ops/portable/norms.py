"""What RMSNorm and LayerNorm share: argument checks, the scale of a row and the gradient of the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import refuse_shape
from isobit.ops.portable.sums import mean_last
from isobit.ops.share import accumulation_dtype

NUMBERS = (float, int)


def check_norm(x: Tensor, weight: Tensor, eps: float, axes: int) -> None:
    """Raise unless x is [..., n] (or [..., T, H, n] where `axes` is 2), weight is [n], and eps is at least 0."""
    shape, sizes = weight.shape, x.shape  # once: this runs before every call
    if len(shape) != 1 or not shape[0]:
        refuse_shape("weight", weight, "[n], n ≥ 1", "pass one factor per feature")
    n = shape[0]
    if len(sizes) < axes or sizes[-1] != n or (axes == 2 and not sizes[-2]):
        expected = f"[..., {'T, H, ' if axes == 2 else ''}{n}], as weight is [{n}]"
        refuse_shape("x", x, expected, "make the last axis of x as long as weight")
    if not isinstance(eps, NUMBERS) or not 0 <= eps < math.inf:
        raise ArgumentError(
            expected="eps of 0 or more",
            received=f"{eps!r}",
            remedy="pass a small number, such as 1e-6",
        )


def empty_statistics(x: Tensor) -> Tensor:
    """Return an empty tensor with one number per row of x, in the accumulation dtype."""
    return x.new_empty(x.shape[:-1], dtype=accumulation_dtype(x.dtype))


def scale_of(rows: Tensor, eps: float) -> Tensor:
    """Return [R, 1], 1 / sqrt(mean of squares + eps).

    The square root is taken in fp64 and then rounded: that is correctly rounded in fp32 with every math library.
    """
    total = mean_last(rows * rows) + torch.tensor(eps, dtype=rows.dtype)
    return torch.ones((), dtype=rows.dtype) / total.double().sqrt().to(rows.dtype)


def input_grad(weighted: Tensor, normal: Tensor, scales: Tensor, level: Tensor | None) -> Tensor:
    """Return scale · (a − x̂ · mean(a · x̂)) with a = `weighted` and x̂ = `normal`.

    Args:
        weighted: Upstream gradient times weight, [R, n].
        normal: The normalized rows, [R, n].
        scales: [R, 1].
        level: mean(a) [R, 1], subtracted from a first; None for RMSNorm, which does not center its rows.
    """
    centred = weighted if level is None else weighted - level
    return (centred - normal * mean_last(weighted * normal)) * scales
