"""The linear_logprob operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_softcap, check_tensors, refuse_shape
from isobit.ops.device_tables import is_capturing, refuse_capture
from isobit.ops.gpu.executors import is_asked_for
from isobit.ops.linear.op import check_linear
from isobit.ops.logprob import portable
from isobit.ops.logprob.supported import LogprobOfLogits, kept_of
from isobit.ops.portable.samples import as_samples, spans_of, whole_samples
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.share import (
    accumulation_dtype,
    as_partial,
    check_default,
    check_share,
    gradient_dtype,
    share_in_force,
)
from isobit.order.samples import Samples

IGNORED = -100  # as torch's cross_entropy


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    samples: Samples | Tensor | None = None,
    support: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Log-probabilities of chosen tokens, from hidden states and the weight of the language-model head.

    Computes log_softmax(hidden @ weight.T / temperature) at each target without keeping the logits. Rollout and
    training both call this function: a value depends on its row of `hidden` and its target, and on nothing else in the
    batch.

    Args:
        hidden: Shape [..., K], in fp32, bf16 or fp16.
        weight: Shape [V, K], in the dtype of hidden.
        targets: Token ids of shape [...], int64 or int32; −100 gives 0 and has no gradient.
        temperature: Divides the logits; positive.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`). By default hidden [B, T, K]
            is B samples.
        support: The ids that could be drawn (top-k, top-p), over which to normalise: [..., n] filled up with -1, or
            booleans [..., V]. By default the whole vocabulary. On the CPU.
        softcap: Logits become softcap · tanh(logit / softcap), before the temperature; by default they are not capped.
            On the CPU, the logits of the call are then in memory.

    Returns:
        Tensor of the shape of targets, in fp32.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or a target is not in the vocabulary
            or not in its support.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> hidden, weight = torch.randn(4, 16), torch.randn(50, 16)
        >>> targets = torch.tensor([3, 49, -100, 0])
        >>> found = isobit.linear_logprob(hidden, weight, targets)
        >>> torch.equal(found[1:2], isobit.linear_logprob(hidden[1:2], weight, targets[1:2]))
        True
    """
    check_tensors(WITH_GPU, hidden=hidden, weight=weight)
    check_linear(hidden, weight, None)
    check_targets(hidden, len(weight), targets)
    check_temperature(temperature)
    known = as_samples(samples)
    if known is None:
        check_default(hidden, weight)
    else:
        check_share(known, weight)
    known = known or whole_samples(hidden, None)
    spans = spans_of(known, hidden)
    rows, chosen = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1).to(torch.int64).contiguous(),
    )
    check_softcap(softcap)
    capped = () if softcap is None else (float(softcap),)
    if support is not None or (capped and not is_asked_for((hidden, weight))):
        check_tensors(hidden=hidden)  # on the CPU
        kept = None if support is None else kept_of(support, hidden, targets, len(weight))
        scored = LogprobOfLogits.apply(  # type: ignore[no-untyped-call]
            rows, weight, chosen, kept, float(temperature), spans, known.total, softcap or 0.0
        )
        return scored.reshape(targets.shape)  # type: ignore[no-any-return]
    sizes = (targets.numel(), *reversed(weight.shape))
    given = (rows, weight, chosen, float(temperature), spans, known.total, *capped)
    found, _ = launch("linear_logprob", sizes, *given)
    return found.reshape(targets.shape)  # type: ignore[no-any-return]


def check_targets(hidden: Tensor, vocabulary: int, targets: Tensor) -> None:
    """Raise unless there is one id per row, each in the vocabulary or −100."""
    if targets.dtype not in (torch.int64, torch.int32) or targets.device != hidden.device:
        raise ArgumentError(
            expected=f"int64 or int32 targets on {hidden.device}",
            received=f"{targets.dtype} on {targets.device}",
            remedy="pass token ids",
        )
    if targets.shape != hidden.shape[:-1]:
        refuse_shape(
            "targets",
            targets,
            f"{list(hidden.shape[:-1])}, as the rows of hidden",
            "pass one id per row",
        )
    if targets.numel() and not targets.is_meta:
        wrong = ((targets < 0) & (targets != IGNORED)) | (targets >= vocabulary)
        if is_capturing():
            if torch.version.hip:  # where an assertion on the device does nothing
                refuse_capture("targets, which the host checks")
            torch._assert_async(~wrong.any())
        elif bool(wrong.any()):
            raise ArgumentError(
                expected=f"targets from 0 to {vocabulary - 1}, or {IGNORED} for none",
                received=f"{int(targets[wrong][0])}",
                remedy="check the tokenizer against the model's vocabulary",
            )


def check_temperature(temperature: float) -> None:
    """Raise unless the temperature is positive and finite."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ArgumentError(
            expected="a positive temperature",
            received=f"{temperature}",
            remedy="use 1.0, or take the argmax instead of a temperature of 0",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, targets, ctx.temperature, spans, ctx.of, *ctx.cap = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.share = share_in_force()
    ctx.save_for_backward(hidden, weight, targets, output[1], spans)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        want = ctx.needs_input_grad[:2]
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        how = ctx.temperature, *want, ctx.of, *ctx.cap
        dhidden, dweight = operator(grad, *ctx.saved_tensors, *how)
        dweight = as_partial(dweight, ctx.share) if want[1] else None
        return dhidden if want[0] else None, dweight, *[None] * (4 + len(ctx.cap))

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def fake(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        rows, wide = hidden.shape[0], accumulation_dtype(hidden.dtype)
        return hidden.new_empty(rows, dtype=wide), hidden.new_empty((rows, 2), dtype=wide)

    def fake_backward(
        grad: Tensor,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        stats: Tensor,
        spans: Tensor,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        of = rest[3] if len(rest) > 3 else 0
        dtype = gradient_dtype(weight.dtype, len(spans), of)
        return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape, dtype=dtype)

    register_operator("linear_logprob", prefix, fake, backward_with(prefix), setup_context)
    register_operator("linear_logprob", f"{prefix}_backward", fake_backward)


@portable_operator("portable_linear_logprob")
def portable_linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    spans: Tensor | None,
    of: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return portable.linear_logprob(hidden, weight, targets, temperature, softcap)


@portable_operator("portable_linear_logprob_backward")
def portable_linear_logprob_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    spans: Tensor,
    temperature: float,
    want_hidden: bool,
    want_weight: bool,
    of: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    samples = whole_samples(hidden, spans, of if want_weight else 0)
    return portable.linear_logprob_backward(
        grad, hidden, weight, targets, stats, samples, temperature, softcap
    )


declare("linear_logprob", register_formulas, triton="isobit.ops.logprob.triton")
