"""Gradients of a split linear layer's parameters, which need no communication.

Of a share of the global batch they are unrounded fp32; of the whole batch they are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.ops import dispatch
from isobit.ops.portable.samples import as_samples, spans_of, whole_samples
from isobit.ops.share import Share, as_partial
from isobit.order.samples import Samples


def samples_of(samples: Samples | Tensor | None, rows: Tensor) -> Samples:
    """Return the given samples, or the operators' default: [B, T, K] is B samples."""
    known = as_samples(samples)
    return whole_samples(rows, None) if known is None else known


def weight_grad(grad: Tensor, x: Tensor, samples: Samples, share: Share | None) -> Tensor:
    """Return dW [N, K] of these samples; `share` is the one that was open in the forward."""
    return as_partial(operator("weight", x)(grad, x, spans_of(samples, x), samples.total), share)


def bias_grad(grad: Tensor, samples: Samples, share: Share | None) -> Tensor:
    """Return db [N] of these samples."""
    return as_partial(operator("bias", grad)(grad, spans_of(samples, grad), samples.total), share)


def operator(kind: str, given: Tensor) -> Callable[..., Tensor]:
    """Return the operator for a gradient ("input", "weight", "bias"), native or portable."""
    prefix = "linear" if dispatch.is_native(given.dtype) else "portable_linear"
    return getattr(torch.ops.isobit, f"{prefix}_{kind}_grad")  # type: ignore[no-any-return]
