"""The causal_conv operator: its torch operators, their gradients, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.causal_conv import portable
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.portable.sums import round_once
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.share import accumulation_dtype, as_partial, described_dtype, share_in_force
from isobit.ops.summed_rows import sum_over_samples
from isobit.order.samples import Samples


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    samples: Samples | Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Convolve each channel with its last K values, y[t] = Σ weight[i] · x[t − K + 1 + i], within each sample.

    The taps are added from the oldest row to the newest, in fp32, and the sum is rounded once. Rows of other samples
    are not read, whether samples are packed or padded, and a token that is decoded has the bits of a prefill's.

    Args:
        x: Shape [B, T, C] or [rows, C], in fp32, bf16 or fp16.
        weight: Shape [C, 1, K], as torch.nn.Conv1d with groups=C has it, in the dtype of x.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`). By default x [B, T, C] is B
            samples.
        before: The K − 1 rows before the first row of each sample, [samples, K − 1, C]: where a sample goes on behind a
            cache. By default they are zeros. It has no gradient.

    Returns:
        Tensor in the shape and dtype of x; zeros in rows of no sample.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If a gradient of `before` is needed, or the samples are a share and gradients are taken
            outside isobit.parallel.Gradients.

    Example:
        >>> x, weight = torch.randn(1, 9, 4), torch.randn(4, 1, 3)
        >>> whole = isobit.causal_conv(x, weight)
        >>> torch.equal(isobit.causal_conv(x[:, 8:], weight, before=x[:, 6:8]), whole[:, 8:])
        True
    """
    check_tensors(WITH_GPU, x=x, weight=weight, before=before)
    if weight.dim() != 3 or weight.shape[1] != 1 or 0 in weight.shape:
        refuse_shape("weight", weight, "[C, 1, K]", "pass the weight of Conv1d with groups=C")
    channels, _, taps = weight.shape
    if x.dim() < 2 or x.shape[-1] != channels:
        refuse_shape("x", x, f"[..., T, {channels}]", "make the last axis of x its channels")
    spans, of = describe(samples, x, weight)
    if before is not None:
        check_before(before, x, spans, taps)
    return launch("causal_conv", rows_and_columns, x, weight, spans, before, of)  # type: ignore[no-any-return]


def check_before(before: Tensor, x: Tensor, spans: Tensor | None, taps: int) -> None:
    """Raise unless there are K - 1 rows for each sample, and no gradient of them is needed."""
    count = x.shape[:-2].numel() if spans is None else len(spans)
    if tuple(before.shape) != (count, taps - 1, x.shape[-1]):
        expected = f"{[count, taps - 1, x.shape[-1]]}, the rows before each sample"
        refuse_shape("before", before, expected, "pass the last rows of what came before, or zeros")
    if torch.is_grad_enabled() and before.requires_grad:
        raise UnsupportedError(
            expected="rows before a sample that need no gradient",
            received="before= with requires_grad",
            remedy="train on whole samples, in one call; or pass before.detach()",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, spans, before, ctx.of = inputs
    ctx.save_for_backward(x, weight, spans, before)
    ctx.share = share_in_force()


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, spans, before = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        dx, terms = operator(grad, x, weight, spans, before)
        dweight = None
        if ctx.needs_input_grad[1]:
            total = sum_over_samples(terms, spans, ctx.of).reshape(weight.shape)
            dtype = described_dtype(weight.dtype, spans, ctx.of)
            dweight = as_partial(round_once(total, dtype), ctx.share)
        return dx, dweight, None, None, None

    def fake(
        grad: Tensor, x: Tensor, weight: Tensor, spans: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        terms = (*x.shape[:-1], weight.numel())
        return x.new_empty(x.shape), x.new_empty(terms, dtype=accumulation_dtype(x.dtype))

    register_operator(
        "causal_conv", prefix, lambda x, *_: x.new_empty(x.shape), backward, setup_context
    )
    register_operator("causal_conv", f"{prefix}_backward", fake)


@portable_operator("portable_causal_conv")
def portable_causal_conv(
    x: Tensor, weight: Tensor, spans: Tensor | None, before: Tensor | None, of: int = 0
) -> Tensor:
    return portable.causal_conv(x, weight, rows_of(x, spans), before)


@portable_operator("portable_causal_conv_backward")
def portable_causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, spans: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    return portable.causal_conv_backward(grad, x, weight, rows_of(x, spans), before)


def rows_of(x: Tensor, spans: Tensor | None) -> Samples:
    """Return the samples of a call; where they are in the global batch does not matter to them."""
    return whole_samples(x, spans)


# Elementwise operations of torch, a few per tap: a native kernel would save passes over memory and change no bits.
declare("causal_conv", register_formulas, native=False, triton="isobit.ops.causal_conv.triton")
