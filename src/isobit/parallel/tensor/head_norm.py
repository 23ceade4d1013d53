"""RMS norm of attention heads that are split over ranks; every rank has the whole weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import check_tensors, widen_for_autocast
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.portable.norms import check_norm
from isobit.ops.portable.samples import check_rows
from isobit.ops.portable.sums import round_once
from isobit.ops.registration import launch, rows_and_columns
from isobit.ops.rms_norm import partial
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.plan import FEATURE_CAP
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def head_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.rms_norm(heads=True)` of this rank's heads, with the bits of the unsplit one.

    The weight's gradient is a sum over heads within each sample, then over samples. So the ranks'
    sums of each sample are all-reduced first, and samples are added afterwards.

    Args:
        x: This rank's heads. # [..., T, H/P, n]
        weight: On every rank. # [n]
        eps: Added to the mean square.
        tp_group: The P ranks; P must divide the segments of the heads.
        samples: Which tokens belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, ...] is B samples.

    Returns:
        The normalized heads of this rank. # [..., T, H/P, n]
    """
    x, weight = widen_for_autocast(x, weight)
    check_tensors(x=x, weight=weight)
    check_norm(x, weight, eps, 2)
    heads = x.shape[-2]
    partial.find_subtree("heads", tp_group.rank * heads, heads, tp_group.size * heads, FEATURE_CAP)
    known = samples_of(samples, x.select(-2, 0))
    check_rows(known, x.select(-2, 0))
    check_share(known, weight)
    return HeadNorm.apply(x, weight, eps, known, tp_group)  # type: ignore[no-untyped-call,no-any-return]


class HeadNorm(torch.autograd.Function):
    """Normalizes locally; the weight's gradient is one sum over all ranks' heads."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        samples: Samples,
        tp_group: TensorParallelGroup,
    ) -> Tensor:
        """Normalize this rank's heads."""
        y, scales = launch("rms_norm", rows_and_columns(x), x, weight, eps, None, True, 0)
        ctx.save_for_backward(x, weight, scales)
        ctx.samples, ctx.tp_group, ctx.share = samples, tp_group, share_in_force()
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Compute dx locally, and dweight [n] over the heads of all ranks."""
        x, weight, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.head_norm")()
        samples, tp_group, heads = ctx.samples, ctx.tp_group, x.shape[-2]
        dx, totals = partial.sample_grads(
            grad,
            x,
            weight,
            scales,
            samples,
            heads_total=heads * tp_group.size,
            first_head=heads * tp_group.rank,
        )
        into_weight = None
        if ctx.needs_input_grad[1]:
            into_weight = merge_weight_grad(totals, samples, tp_group)
            into_weight = into_weight if samples.is_share else round_once(into_weight, weight.dtype)
            into_weight = as_partial(into_weight, ctx.share)
        return dx, into_weight, None, None, None


def merge_weight_grad(totals: Tensor, samples: Samples, tp_group: TensorParallelGroup) -> Tensor:
    """Sum this rank's totals [samples, n] over the heads of all ranks, then over samples to [n]."""
    tp_group.all_reduce(totals)
    return partial.merge_samples(totals, samples.of)
