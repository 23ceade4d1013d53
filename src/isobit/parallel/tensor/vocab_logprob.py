"""Log-probabilities and cross-entropy over a vocabulary that is split over ranks.

Each rank reduces its logits to a pair (max, sum of exponentials) per token; the pairs are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.foundation import launches
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.linear.op import check_linear
from isobit.ops.logprob import partial
from isobit.ops.logprob.loss import count_active
from isobit.ops.logprob.op import IGNORED, check_targets
from isobit.ops.portable.samples import spans_of
from isobit.ops.portable.sums import round_once
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.order.cut import Cut
from isobit.order.samples import Samples
from isobit.parallel.tensor.parameter_grads import samples_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup


def vocab_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: TensorParallelGroup,
    temperature: float = 1.0,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.linear_logprob` of a weight that is split over ranks, with the unsplit bits.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        targets: Tokens of the whole vocabulary, on every rank. # [...]
        tp_group: The P ranks; P must divide the segments of V.
        temperature: Divides the logits.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The log-probability of each target in fp32, on every rank. # [...]
    """
    check_tensors(hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    cut = Cut(len(weight) * tp_group.size, tp_group.size, tp_group.rank)
    check_targets(hidden, cut.extent, targets)
    known = samples_of(samples, hidden)
    check_share(known, weight)
    rows, chosen = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1).to(torch.int64).contiguous(),
    )
    spans = spans_of(known, hidden)
    found: Tensor = VocabLogprob.apply(
        rows, weight, chosen, spans, temperature, cut, known.of, tp_group
    )  # type: ignore[no-untyped-call]
    return found.reshape(targets.shape)


class VocabLogprob(torch.autograd.Function):
    """Gathers the pairs of all ranks; sums dhidden over ranks; dweight is local."""

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
        tp_group: TensorParallelGroup,
    ) -> Tensor:
        """Reduce this rank's logits to pairs [T, 2], gather and merge those of all ranks."""
        pairs, chosen = partial.forward(hidden, weight, targets, temperature, cut)
        if launches.is_recording():
            sizes = (targets.numel(), *reversed(weight.shape))
            launches.record(
                "linear_logprob", dispatch.executor_of(hidden.dtype), hidden.dtype, sizes
            )
        held = tp_group.all_gather(torch.cat([pairs, chosen.unsqueeze(1)], 1))  # [P, T, 3]
        owner = targets.clamp(min=0) // cut.length  # the rank that has the target's logit
        of_target = held[:, :, 2].gather(0, owner.unsqueeze(0)).squeeze(0)
        found, stats = partial.finish(partial.merge(held[:, :, :2]), of_target, targets)
        ctx.save_for_backward(hidden, weight, targets, stats, spans)
        ctx.temperature, ctx.cut, ctx.of, ctx.tp_group = temperature, cut, of, tp_group
        ctx.share = share_in_force()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sum dhidden [T, K] over ranks; dweight [V/P, K] is local."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.vocab_logprob")()
        want = ctx.needs_input_grad[:2]
        given = (grad, *ctx.saved_tensors, ctx.temperature, ctx.cut, ctx.of)
        total, into_weight = partial.backward(*given, want_hidden=want[0], want_weight=want[1])
        into_hidden = None
        if want[0]:
            ctx.tp_group.all_reduce(total)
            into_hidden = round_once(total, ctx.saved_tensors[0].dtype)
        return into_hidden, as_partial(into_weight, ctx.share) if want[1] else None, *[None] * 6


def vocab_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tp_group: TensorParallelGroup,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """Compute `isobit.linear_cross_entropy` of a weight that is split over ranks.

    Args:
        hidden: The hidden states, on every rank. # [..., K]
        weight: This rank's rows. # [V/P, K]
        targets: Tokens of the whole vocabulary, on every rank. # [...]
        tp_group: The P ranks; P must divide the segments of V.
        temperature: Divides the logits.
        ignore_index: Targets that have no loss.
        num_items: What the sum is divided by; None is the number of active targets.
        samples: Which rows of hidden belong to which sample, as `Samples` or cumulative lengths
            (`cu_seqlens`); default: [B, T, K] is B samples.

    Returns:
        The loss, on every rank.
    """
    chosen, active = count_active(targets, ignore_index, num_items)
    found = vocab_logprob(
        hidden, weight, chosen, tp_group=tp_group, temperature=temperature, samples=samples
    )
    return exact_sum(found) / -active
