"""Log-probabilities and the loss over a vocabulary that is spread over ranks: pairs (max, sum) are exchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit import launches
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.linear.op import check_linear
from isobit.ops.logprob import partial
from isobit.ops.logprob.loss import count_active
from isobit.ops.logprob.op import IGNORED, check_targets
from isobit.ops.portable.rounding import round_once
from isobit.ops.portable.samples import spans_of
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.shard import Ranks


def vocab_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ranks: Ranks,
    temperature: float = 1.0,
    samples: Samples | None = None,
) -> Tensor:
    """isobit.linear_logprob of a weight [V/P, K] that is this rank's rows; hidden and targets are on every rank.

    The bits are those of the unsplit operator, forward and backward. P must divide the segments of V.
    """
    check_tensors(hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    cut = Cut(len(weight) * ranks.parts, ranks.parts, ranks.coordinate)
    check_targets(hidden, cut.extent, targets)
    known = samples_of(samples, hidden)
    check_share(known, weight)
    rows, chosen = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1).to(torch.int64).contiguous(),
    )
    spans = spans_of(known, hidden)
    found: Tensor = Logprob.apply(rows, weight, chosen, spans, temperature, cut, known.of, ranks)  # type: ignore[no-untyped-call]
    return found.reshape(targets.shape)


class Logprob(torch.autograd.Function):
    """A rank sums over its words; dhidden is one sum over all ranks' words, the weight's gradient is local."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        spans: Tensor,
        temperature: float,
        cut: Cut,
        of: int,
        ranks: Ranks,
    ) -> Tensor:
        pairs, chosen = partial.forward(hidden, weight, targets, temperature, cut)
        if launches.is_recording():
            sizes = (targets.numel(), *reversed(weight.shape))
            launches.record("linear_logprob", dispatch.is_native(hidden.dtype), hidden.dtype, sizes)
        held = ranks.gather(torch.cat([pairs, chosen.unsqueeze(1)], 1))  # [P, T, 3]
        owner = targets.clamp(min=0) // cut.length  # whose logit is the target's
        of_target = held[:, :, 2].gather(0, owner.unsqueeze(0)).squeeze(0)
        found, stats = partial.finish(partial.merge(held[:, :, :2]), of_target, targets)
        ctx.save_for_backward(hidden, weight, targets, stats, spans)
        ctx.temperature, ctx.cut, ctx.of, ctx.ranks = temperature, cut, of, ranks
        ctx.share = share_in_force()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logprob")()
        want = ctx.needs_input_grad[:2]
        given = (grad, *ctx.saved_tensors, ctx.temperature, ctx.cut, ctx.of)
        total, into_weight = partial.backward(*given, want_hidden=want[0], want_weight=want[1])
        into_hidden = None
        if want[0]:
            ctx.ranks.merge(total)
            into_hidden = round_once(total, ctx.saved_tensors[0].dtype)
        return into_hidden, as_partial(into_weight, ctx.share) if want[1] else None, *[None] * 6


def vocab_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ranks: Ranks,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    samples: Samples | None = None,
) -> Tensor:
    """isobit.linear_cross_entropy of a weight [V/P, K] that is this rank's rows; every rank has the loss."""
    chosen, active = count_active(targets, ignore_index, num_items)
    found = vocab_logprob(
        hidden, weight, chosen, ranks=ranks, temperature=temperature, samples=samples
    )
    return exact_sum(found) / -active
