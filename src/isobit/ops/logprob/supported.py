"""linear_logprob over a support, the ids that top-k or top-p kept, and of logits with a soft cap.

A token outside of the support has the logit -inf, so the normaliser is the sum of linear_logprob with zeros added, in
the same order: it depends on which ids are kept, and not on how they are listed or padded. With all ids kept, values
and gradients are those of linear_logprob bit for bit. The logits [T, V] of a call are kept for its gradient, and with a
soft cap its derivative too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobit.errors import ArgumentError
from isobit.foundation.machine import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.linear.op import linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.portable import inverse
from isobit.ops.portable.elementary import exp_nonpositive, soft_cap
from isobit.ops.portable.sums import one_nan, round_once
from isobit.ops.share import as_partial, gradient_dtype, share_in_force

FILLER = -1
soft_cap_logits = keeping_subnormals(soft_cap)


class LogprobOfLogits(torch.autograd.Function):
    """Compute log p of targets [T] from hidden [T, K], weight [V, K], and kept [T, V] or None for all."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        temperature: float,
        spans: Tensor,
        of: int,
        softcap: float,
    ) -> Tensor:
        logits, slope = linear_fp32(hidden, weight), None
        if softcap:
            logits, slope = soft_cap_logits(logits, softcap)
        logits = logits * inverse(temperature, logits.dtype)
        if kept is not None:
            logits = torch.where(kept, logits, -torch.inf)
        rows = log_softmax(logits)
        ctx.save_for_backward(hidden, weight, targets, rows, spans, slope)
        ctx.temperature, ctx.of, ctx.share = temperature, of, share_in_force()
        chosen = rows.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return one_nan(torch.where(targets < 0, 0.0, chosen))

    @staticmethod
    @once_differentiable
    @keeping_subnormals
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, rows, spans, slope = ctx.saved_tensors
        weights = exp_nonpositive(rows)
        at_target = torch.arange(rows.shape[1]) == targets.unsqueeze(1)
        scaled = torch.where(targets < 0, 0.0, grad * inverse(ctx.temperature, grad.dtype))
        spread = torch.where(at_target, 1.0 - weights, -weights) * scaled.unsqueeze(1)
        if slope is not None:
            spread = spread * slope
        prefix = "linear" if dispatch.is_native(spread.dtype) else "portable_linear"
        into_hidden, into_weight = (
            getattr(torch.ops.isobit, f"{prefix}_{part}_grad") for part in ("input", "weight")
        )
        dhidden = dweight = None
        if ctx.needs_input_grad[0]:
            total = into_hidden(spread, weight.to(spread.dtype))
            dhidden = round_once(total, hidden.dtype)
        if ctx.needs_input_grad[1]:
            total = into_weight(spread, hidden.to(spread.dtype), spans, ctx.of)
            dtype = gradient_dtype(weight.dtype, len(spans), ctx.of)
            dweight = as_partial(round_once(total, dtype), ctx.share)
        return dhidden, dweight, *[None] * 6


def kept_of(support: Tensor, hidden: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Return which tokens are kept, [T, V], from ids [..., n] filled up with -1, or from booleans [..., V].

    Raises:
        ArgumentError: If shapes do not fit, an id is not in the vocabulary, or a target was not kept.
    """
    check_tensors(hidden=hidden)  # on the CPU
    if support.shape[:-1] != targets.shape or support.dim() != targets.dim() + 1:
        expected = f"{[*targets.shape, 'n']}: ids filled up with -1, or booleans of the vocabulary"
        refuse_shape("support", support, expected, "pass what isobit.sampling.sample kept")
    flat = support.reshape(targets.numel(), support.shape[-1])
    chosen = targets.reshape(-1, 1).long()
    if support.dtype == torch.bool:
        if support.shape[-1] != vocabulary:
            refuse_shape("support", support, f"[..., {vocabulary}]", "pass one boolean per token")
        kept = flat
    else:
        kept = kept_of_ids(flat, vocabulary)
    scored = chosen >= 0
    lost = scored & ~kept.gather(1, chosen.clamp(min=0))
    if bool(lost.any()):
        at = int(lost.reshape(-1).nonzero()[0])
        raise ArgumentError(
            expected="targets that are in their support: the policy could not have drawn others",
            received=f"{int(lost.sum())} of {int(scored.sum())} that are not; the first is row {at}, "
            f"target {int(chosen[at])}",
            remedy="align support with targets: entry t has the ids from which the token after t was drawn",
        )
    return kept | ~scored  # a row without a target has a defined value, which nothing uses


def kept_of_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Return booleans [T, V] of ids [T, n]."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            expected="support of int64 or int32 ids, or of booleans",
            received=str(ids.dtype),
            remedy="pass token ids",
        )
    wrong = (ids < FILLER) | (ids >= vocabulary)
    if bool(wrong.any()):
        raise ArgumentError(
            expected=f"ids from 0 to {vocabulary - 1} in support, or {FILLER} to fill up",
            received=f"{int(ids[wrong][0])}",
            remedy="check the tokenizer against the model's vocabulary",
        )
    room = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool)
    filled = torch.where(ids < 0, vocabulary, ids).long()
    return room.scatter(1, filled, True)[:, :vocabulary].contiguous()
