"""The norm of heads that are spread over ranks; every rank holds the weight, and samples' sums are exchanged first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import check_tensors, widen_for_autocast
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.portable.norms import check_norm
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import spans_of
from isobit.ops.registration import launch, rows_and_columns
from isobit.ops.rms_norm import partial
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.plan import FEATURE_CAP
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.shard import Ranks


def head_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, ranks: Ranks, samples: Samples | None = None
) -> Tensor:
    """isobit.rms_norm(heads=True) of this rank's heads: x is [..., T, H/P, n], weight [n] is on every rank.

    The weight's gradient sums over heads inside each sample, then over samples. So the ranks' sums of each sample are
    merged by the tree over heads, and only then the samples: the bits of the unsplit operator, on every rank. P must
    divide the segments of the heads.
    """
    x, weight = widen_for_autocast(x, weight)
    check_tensors(x=x, weight=weight)
    check_norm(x, weight, eps, 2)
    heads = x.shape[-2]
    partial.find_subtree("heads", ranks.coordinate * heads, heads, ranks.parts * heads, FEATURE_CAP)
    known = samples_of(samples, x.select(-2, 0))
    spans_of(known, x.select(-2, 0))
    check_share(known, weight)
    return HeadNorm.apply(x, weight, eps, known, ranks)  # type: ignore[no-untyped-call,no-any-return]


class HeadNorm(torch.autograd.Function):
    """Rows and their gradients are local; the weight's gradient is one sum over all ranks' heads."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, samples: Samples, ranks: Ranks
    ) -> Tensor:
        y, scales = launch("rms_norm", rows_and_columns(x), x, weight, eps, None, True, 0)
        ctx.save_for_backward(x, weight, scales)
        ctx.samples, ctx.ranks, ctx.share = samples, ranks, share_in_force()
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.head_norm")()
        samples, ranks, heads = ctx.samples, ctx.ranks, x.shape[-2]
        dx, totals = partial.sample_grads(
            grad,
            x,
            weight,
            scales,
            samples,
            heads_total=heads * ranks.parts,
            first_head=heads * ranks.coordinate,
        )
        into_weight = None
        if ctx.needs_input_grad[1]:
            into_weight = merge_weight_grad(totals, samples, ranks)
            into_weight = into_weight if samples.is_share else round_once(into_weight, weight.dtype)
            into_weight = as_partial(into_weight, ctx.share)
        return dx, into_weight, None, None, None


def merge_weight_grad(totals: Tensor, samples: Samples, ranks: Ranks) -> Tensor:
    """[n], unrounded, of this rank's sums of each sample [samples, n]: heads are merged before samples."""
    ranks.merge(totals)
    return partial.merge_samples(totals, samples.of)
