"""Gradients of parameters that a rank holds: unrounded of a share of the batch, rounded once of the whole."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops import dispatch
from isobit.ops.linear.op import spans_of, whole_samples
from isobit.order.samples import Samples


def samples_of(samples: Samples | None, rows: Tensor) -> Samples:
    """The samples said, or the operators' default: [B, T, K] is B samples."""
    return whole_samples(rows, None) if samples is None else samples


def weight_grad(grad: Tensor, x: Tensor, samples: Samples) -> Tensor:
    """dW [N, K] of these samples."""
    prefix = "linear" if dispatch.is_native(x.dtype) else "portable_linear"
    found = getattr(torch.ops.isobit, f"{prefix}_weight_grad")(grad, x, spans_of(samples, x), samples.of)
    return found  # type: ignore[no-any-return]


def bias_grad(grad: Tensor, samples: Samples) -> Tensor:
    """db [N] of these samples."""
    prefix = "linear" if dispatch.is_native(grad.dtype) else "portable_linear"
    found = getattr(torch.ops.isobit, f"{prefix}_bias_grad")(grad, spans_of(samples, grad), samples.of)
    return found  # type: ignore[no-any-return]
