"""Logits over a vocabulary that is split over ranks: computed per rank, then gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.op import linear_fp32
from isobit.ops.portable.samples import check_rows
from isobit.ops.portable.sums import round_once
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of, weight_grad
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def vocab_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    tp_group: TensorParallelGroup,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Return all logits in unrounded fp32, with the bits of the unsplit layer.

    In the backward, the gradient is first rounded to the dtype of `hidden`.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        tp_group: The P ranks; P must divide the segments of V.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The logits, on every rank. # [..., V]
    """
    cut = Cut(len(weight) * tp_group.size, tp_group.size, tp_group.rank)
    known = samples_of(samples, hidden)
    check_rows(known, hidden)
    check_share(known, weight)
    return VocabLogits.apply(hidden, weight, cut, tp_group, known)  # type: ignore[no-untyped-call,no-any-return]


class VocabLogits(torch.autograd.Function):
    """hidden · weightᵀ as the unrounded fp32 sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cut: Cut,
        tp_group: TensorParallelGroup,
        samples: Samples,
    ) -> Tensor:
        """Compute this rank's logits [..., V/P] and gather all [..., V]."""
        ctx.save_for_backward(hidden, weight)
        ctx.cut, ctx.tp_group, ctx.samples, ctx.share = cut, tp_group, samples, share_in_force()
        return torch.cat(list(tp_group.all_gather(linear_fp32(hidden, weight)).unbind(0)), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sum dhidden [..., K] over ranks; dweight [V/P, K] is local."""
        hidden, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logits")()
        cut, want = ctx.cut, ctx.needs_input_grad
        rounded = grad[..., cut.start : cut.start + cut.length].to(hidden.dtype)
        into_hidden = None
        if want[0]:
            total = partial.input_grad(rounded, weight, cut).values[0]
            ctx.tp_group.all_reduce(total)
            into_hidden = round_once(total, hidden.dtype)
        into_weight = weight_grad(rounded, hidden, ctx.samples, ctx.share) if want[1] else None
        return into_hidden, into_weight, None, None, None
