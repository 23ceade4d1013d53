"""The language-model head: fp32 logits, the loss without logits, and selected log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import Layout
from isobit.integrations.transformers.package import library
from isobit.nn.linear import read_weight
from isobit.ops.arguments import cast_for_autocast, check_softcap
from isobit.ops.linear.op import linear, linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.ops.logprob.portable import inverse
from isobit.ops.logprob.supported import kept_of, soft_cap_logits
from isobit.ops.portable.samples import spans_of
from isobit.ops.registration import PREFIXES, executor_of
from isobit.ops.share import as_partial, check_share, share_in_force
from isobit.ops.softmax.op import softmax
from isobit.order.samples import Samples
from isobit.parallel.tensor.shard import tp_group_of
from isobit.parallel.tensor.vocab import vocab_cross_entropy, vocab_logits, vocab_logprob
from isobit.sampling.support import Truncation

ROWS_AT_ONCE = 256  # whose logits are in memory


class Logits(torch.autograd.Function):
    """Compute hidden · weightᵀ without rounding the fp32 sums; the gradient is rounded to the dtype first."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, samples: Samples | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.samples, ctx.share = samples, share_in_force()
        ctx.prefix = PREFIXES[executor_of("linear", hidden.dtype, (hidden, weight))]
        return linear_fp32(hidden, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        spans, of = (
            (None, 0) if ctx.samples is None else (spans_of(ctx.samples, hidden), ctx.samples.total)
        )
        rounded, want = grad.to(hidden.dtype), ctx.needs_input_grad
        into_hidden, into_weight = (
            getattr(torch.ops.isobit, f"{ctx.prefix}linear_{part}_grad")
            for part in ("input", "weight")
        )
        return (
            into_hidden(rounded, weight) if want[0] else None,
            as_partial(into_weight(rounded, hidden, spans, of), ctx.share) if want[1] else None,
            None,
        )


class CappedLogits(torch.autograd.Function):
    """Compute cap · tanh(logits / cap)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        bent, slope = soft_cap_logits(logits, cap)
        ctx.save_for_backward(slope)
        return bent

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


def scale_logits(logits: Tensor, divisor: float, softcap: float | None) -> Tensor:
    """Return logits as a model scales them after its head: divided, or with a soft cap."""
    if softcap is not None:
        check_softcap(softcap)
        logits = CappedLogits.apply(logits, softcap)  # type: ignore[no-untyped-call]
    if divisor != 1.0:
        logits = logits * inverse(divisor, logits.dtype).to(logits.device)
    return logits


def refuse_split_cap(softcap: float | None) -> None:
    """Raise where the vocabulary is split over ranks, which has no form with a soft cap."""
    if softcap is not None:
        raise UnsupportedError(
            expected="a head that is not split over ranks, for logits with a soft cap",
            received=f"a soft cap of {softcap} and a vocabulary that is split over ranks",
            remedy="unshard the model; or set config.final_logit_softcapping to None, if it is meant to run without",
        )


def logits_of(hidden: Tensor, head: nn.Linear, samples: Samples | None) -> Tensor:
    """Return logits [..., V] in fp32. Their `isobit.log_softmax` equals `isobit.linear_logprob` bit for bit."""
    tp_group, read = tp_group_of(head), read_weight(head)
    hidden, weight = cast_for_autocast(hidden, read.weight)
    if tp_group is not None:
        return vocab_logits(hidden, weight, tp_group=tp_group, samples=samples)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        if samples is not None:
            check_share(samples, weight)
        return Logits.apply(hidden, weight, samples)  # type: ignore[no-untyped-call,no-any-return]
    return linear_fp32(hidden, weight, read.packed if weight is read.weight else None)


def keep_rows(hidden: Tensor, layout: Layout, keep: int | Tensor) -> tuple[Tensor, Samples | None]:
    """Return the rows that `logits_to_keep` selects, and their samples."""
    if isinstance(keep, int):
        if keep == 0:
            return hidden, layout.samples
        return hidden[:, -keep:], layout.last(keep)
    if torch.is_grad_enabled() and hidden.requires_grad:
        raise UnsupportedError(
            expected="logits_to_keep as a number, where gradients are wanted",
            received="a tensor of places",
            remedy="pass labels, which need no logits; or keep the last n",
        )
    return library("modeling_utils").slice_logits_to_keep(hidden, keep), None


def loss_of(
    hidden: Tensor,
    head: nn.Linear,
    layout: Layout,
    labels: Tensor | None,
    inputs: dict[str, Any],
    divisor: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the mean of −log p of the labels, or their sum divided by `num_items_in_batch`.

    Logits are divided by `divisor`, or have a soft cap.
    """
    ignored, targets = inputs.get("ignore_index", IGNORED), inputs.get("shift_labels")
    if targets is None:
        assert labels is not None
        targets = layout.next_of(labels.masked_fill(labels == ignored, IGNORED))
        ignored = IGNORED
    count = inputs.get("num_items_in_batch")
    asked: dict[str, Any] = {
        "ignore_index": ignored,
        "num_items": None if count is None else int(count),
        "samples": layout.samples,
        "temperature": divisor,
    }
    tp_group, read = tp_group_of(head), read_weight(head)
    hidden, weight = cast_for_autocast(hidden, read.weight)
    if tp_group is not None:
        refuse_split_cap(softcap)
        return vocab_cross_entropy(hidden, weight, targets, tp_group=tp_group, **asked)
    return linear_cross_entropy(hidden, weight, targets, softcap=softcap, **asked)


def logprobs_of(
    hidden: Tensor,
    head: nn.Linear,
    layout: Layout,
    targets: Tensor,
    temperature: float,
    support: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return log p of each target, [B, T] in fp32; +0 where the target is -100."""
    asked: dict[str, Any] = {"temperature": temperature, "samples": layout.samples}
    tp_group, read = tp_group_of(head), read_weight(head)
    hidden, weight = cast_for_autocast(hidden, read.weight)
    if tp_group is not None:
        refuse_split_cap(softcap)
        return vocab_logprob(hidden, weight, targets, tp_group=tp_group, **asked)
    return linear_logprob(hidden, weight, targets, support=support, softcap=softcap, **asked)


@torch.no_grad()
def keep_of(
    hidden: Tensor,
    head: nn.Linear,
    support: Tensor | Truncation | None,
    temperature: float,
    softcap: float | None = None,
) -> Tensor | None:
    """Return the support as a tensor: that of a Truncation from logits divided by the temperature."""
    if not isinstance(support, Truncation):
        return support
    read = read_weight(head)
    hidden, weight = cast_for_autocast(hidden, read.weight)
    kept = hidden.new_empty((*hidden.shape[:-1], len(weight)), dtype=torch.bool)
    for rows, into in in_chunks(hidden, kept):
        logits = scale_logits(linear_fp32(rows, weight), 1.0, softcap)
        into.copy_(support.keep(logits * inverse(temperature, logits.dtype)))
    return kept


@torch.no_grad()
def entropy_of(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperature: float,
    support: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """Return −Σ p log p, [B, T] in fp32, in the order of a feature axis; +0 where there is no target."""
    read = read_weight(head)
    hidden, weight = cast_for_autocast(hidden, read.weight)
    kept = None if support is None else kept_of(support, hidden, targets, len(weight))
    found = torch.empty(targets.numel(), 1, dtype=torch.float32)
    ones = torch.ones(1, len(weight))
    start = 0
    for rows, into in in_chunks(hidden, found):
        logits = scale_logits(linear_fp32(rows, weight), 1.0, softcap)
        logits = logits * inverse(temperature, torch.float32)
        if kept is not None:
            logits = torch.where(kept[start : start + len(rows)], logits, -torch.inf)
            start += len(rows)
        every = log_softmax(logits)
        terms = torch.where(every == -torch.inf, 0.0, -softmax(logits) * every)
        into.copy_(linear(terms, ones))
    return torch.where(targets < 0, 0.0, found.reshape(targets.shape))


def in_chunks(hidden: Tensor, result: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of hidden and of the result; a row does not depend on others, so their number is free."""
    rows, out = hidden.reshape(-1, hidden.shape[-1]), result.view(-1, result.shape[-1])
    return zip(torch.split(rows, ROWS_AT_ONCE), torch.split(out, ROWS_AT_ONCE), strict=True)
