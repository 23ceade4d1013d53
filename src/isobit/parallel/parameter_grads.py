"""Gradients of a parameter that a rank holds: unrounded roots of a share, rounded once of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear import partial
from isobit.ops.linear.op import whole_samples
from isobit.ops.linear.partial import Partial
from isobit.ops.linear.portable import round_once
from isobit.order.samples import Samples


def samples_of(samples: Samples | None, rows: Tensor) -> Samples:
    """The samples said, or the operators' default: [B, T, K] is B samples."""
    return whole_samples(rows, None) if samples is None else samples


def weight_grad(grad: Tensor, x: Tensor, samples: Samples) -> Tensor:
    """dW [N, K] of these samples."""
    return deliver(partial.weight_grad(grad, x, samples), samples, x.dtype)


def bias_grad(grad: Tensor, samples: Samples) -> Tensor:
    """db [N] of these samples."""
    return deliver(partial.bias_grad(grad, samples), samples, grad.dtype)


def deliver(found: Partial, samples: Samples, dtype: torch.dtype) -> Tensor:
    """What autograd takes to the parameter; zero where there is no sample."""
    total = found.values[0] if len(found.values) else found.values.sum(0)
    return total if samples.is_share else round_once(total, dtype)
