"""Logits over a vocabulary that is spread over ranks: each rank's are computed where its rows are, then gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.derivatives import refuse_second_order
from isobit.ops.linear import partial
from isobit.ops.linear.op import linear_fp32
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import spans_of
from isobit.ops.share import check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of, weight_grad
from isobit.parallel.tensor.shard import Ranks


def vocab_logits(
    hidden: Tensor, weight: Tensor, *, ranks: Ranks, samples: Samples | None = None
) -> Tensor:
    """[..., V] on every rank, in fp32, not rounded, of hidden [..., K] and this rank's rows of the weight [V/P, K].

    The gradient is rounded to hidden's dtype first, then it is the linear layer's. P must divide the segments of V.
    """
    cut = Cut(len(weight) * ranks.parts, ranks.parts, ranks.coordinate)
    known = samples_of(samples, hidden)
    spans_of(known, hidden)
    check_share(known, weight)
    return Logits.apply(hidden, weight, cut, ranks, known)  # type: ignore[no-untyped-call,no-any-return]


class Logits(torch.autograd.Function):
    """hidden · weightᵀ as the unrounded fp32 sum."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, cut: Cut, ranks: Ranks, samples: Samples
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.cut, ctx.ranks, ctx.samples, ctx.share = cut, ranks, samples, share_in_force()
        return torch.cat(list(ranks.gather(linear_fp32(hidden, weight)).unbind(0)), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logits")()
        cut, want = ctx.cut, ctx.needs_input_grad
        rounded = grad[..., cut.start : cut.start + cut.length].to(hidden.dtype)
        into_hidden = None
        if want[0]:
            total = partial.input_grad(rounded, weight, cut).values[0]
            ctx.ranks.merge(total)
            into_hidden = round_once(total, hidden.dtype)
        into_weight = weight_grad(rounded, hidden, ctx.samples, ctx.share) if want[1] else None
        return into_hidden, into_weight, None, None, None
