"""The torch operators of distillation_loss and their gradients; the public function is in loss.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.distillation import portable
from isobit.ops.portable.samples import as_samples, spans_of, whole_samples
from isobit.ops.registration import (
    declare,
    executor_of,
    launch,
    portable_operator,
    register_operator,
)
from isobit.ops.share import (
    accumulation_dtype,
    as_partial,
    check_default,
    check_share,
    gradient_dtype,
    share_in_force,
)
from isobit.order.samples import Samples

# The teacher, its weight, its ids and the log-probability of its other words, as the operators take them.
Described = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def divergence_and_logprob(
    hidden: Tensor,
    weight: Tensor,
    teacher: Described,
    targets: Tensor,
    temperature: float,
    direction: str,
    beta: float,
    samples: Samples | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence and the log-probability of the target of each token, both [T]."""
    known = as_samples(samples)
    if known is None:
        check_default(hidden, weight)
    else:
        check_share(known, weight)
    known = known or whole_samples(hidden, None)
    spans = spans_of(known, hidden)
    rows, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(torch.int64)
    sizes = (targets.numel(), *reversed(weight.shape))
    head = teacher[1]
    if head is not None and head.dtype != hidden.dtype:
        executor_of("linear", head.dtype, (head,))  # the student's dtype attests its own products
    how = float(temperature), direction, float(beta)
    given = rows, weight, ids.contiguous(), *teacher, *how, spans, known.total
    divergence, logprob, _ = launch("distillation_loss", sizes, *given)
    return divergence, logprob


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.temperature, ctx.direction, ctx.beta, spans, ctx.of = inputs
    del tensors[6]  # the probability of other words: stats have what follows from it
    ctx.mark_non_differentiable(output[2])
    ctx.share = share_in_force()
    ctx.save_for_backward(*tensors, output[2], spans)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(
        ctx: Any, divergence: Tensor, logprob: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        want = ctx.needs_input_grad[:2]
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        *given, spans = ctx.saved_tensors
        how = ctx.temperature, ctx.direction, ctx.beta
        dhidden, dweight = operator(divergence, logprob, *given, spans, *how, *want, ctx.of)
        dweight = as_partial(dweight, ctx.share) if want[1] else None
        return dhidden if want[0] else None, dweight, *[None] * 10

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def fake(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows, wide = hidden.shape[0], accumulation_dtype(hidden.dtype)
        one = hidden.new_empty(rows, dtype=wide)
        return one, torch.empty_like(one), hidden.new_empty((rows, portable.STATS), dtype=wide)

    def fake_backward(
        divergence: Tensor, logprob: Tensor, hidden: Tensor, weight: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        spans, of = rest[5], rest[11] if len(rest) > 11 else 0
        dtype = gradient_dtype(weight.dtype, len(spans), of)
        return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=dtype)

    public = "distillation_loss"
    register_operator(public, prefix, fake, backward_with(prefix), setup_context)
    register_operator(public, f"{prefix}_backward", fake_backward)


@portable_operator("portable_distillation_loss")
def portable_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_ids: Tensor | None,
    teacher_rest: Tensor | None,
    temperature: float,
    direction: str,
    beta: float,
    spans: Tensor | None,
    of: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    given = hidden, weight, targets, teacher, teacher_weight, teacher_ids, teacher_rest
    return portable.distillation_loss(*given, temperature, direction, beta)


@portable_operator("portable_distillation_loss_backward")
def portable_distillation_loss_backward(
    divergence: Tensor,
    logprob: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None,
    teacher_ids: Tensor | None,
    stats: Tensor,
    spans: Tensor,
    temperature: float,
    direction: str,
    beta: float,
    want_hidden: bool,
    want_weight: bool,
    of: int = 0,
) -> tuple[Tensor, Tensor]:
    samples = whole_samples(hidden, spans, of if want_weight else 0)
    given = hidden, weight, targets, teacher, teacher_weight, teacher_ids, stats
    return portable.distillation_loss_backward(
        (divergence, logprob), *given, samples, temperature, direction, beta
    )


declare("distillation_loss", register_formulas, triton="isobit.ops.distillation.triton")
