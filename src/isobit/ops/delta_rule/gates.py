"""The gates of linear attention: the logistic function, and the logarithm of a decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.portable import elementary
from isobit.ops.portable.elementary import HIGHEST, exp_nonpositive, log_positive
from isobit.ops.portable.samples import describe
from isobit.ops.portable.sums import round_once, widen
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


def sigmoid_gate(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x), computed in fp32 and rounded once; one result at every position and stride.

    Args:
        x: Any shape, in fp32, bf16 or fp16.

    Raises:
        ArgumentError: If x is not a supported tensor.
    """
    check_tensors(WITH_GPU, x=x)
    return launch("sigmoid_gate", rows_and_columns, x)  # type: ignore[no-any-return]


def decay_gate(
    a: Tensor, log_rate: Tensor, bias: Tensor, *, samples: Samples | Tensor | None = None
) -> Tensor:
    """Return g = −e^log_rate · softplus(a + bias), the logarithm of each token's decay, in the dtype of sums.

    Args:
        a: Shape [..., T, H], in fp32, bf16 or fp16.
        log_rate: Shape [H], in the dtype of a.
        bias: Shape [H], in the dtype of a.
        samples: The rows of each sample, for the gradients of log_rate and bias. By default a [B, T, H] is B samples.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.
    """
    check_tensors(WITH_GPU, a=a, log_rate=log_rate, bias=bias)
    for name, tensor in (("log_rate", log_rate), ("bias", bias)):
        if a.dim() < 1 or tuple(tensor.shape) != (a.shape[-1],):
            refuse_shape(name, tensor, f"[{a.shape[-1] if a.dim() else 'H'}]", "pass one per head")
    spans, of = describe(samples, a, log_rate, bias)
    return launch("decay_gate", rows_and_columns, a, log_rate, bias, spans, of)  # type: ignore[no-any-return]


def exp_of(x: Tensor) -> Tensor:
    """Return e^x of any number of the dtype of arithmetic."""
    return torch.where(x > HIGHEST[x.dtype], torch.inf, exp_nonpositive(x))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|.

    With u = 1 + e rounded, log(u) · e / (u − 1) makes up for what the rounding of u lost; where u is 1, e itself is it.
    """
    e = exp_nonpositive(-x.abs())
    u = 1.0 + e
    rest = torch.where(u == 1.0, e, log_positive(u) * (e / (u - 1.0)))
    return torch.where(x > 0, x, 0.0) + torch.where(x.isnan(), x, rest)


@portable_operator("portable_sigmoid_gate")
def portable_sigmoid_gate(x: Tensor) -> Tensor:
    """Return the logistic function."""
    return round_once(elementary.sigmoid(widen(x).contiguous())[0], x.dtype).contiguous()


@portable_operator("portable_sigmoid_gate_backward")
def portable_sigmoid_gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return dx = grad · s · (1 − s)."""
    s, rest = elementary.sigmoid(widen(x).contiguous())
    return round_once(widen(grad) * (s * rest), x.dtype).contiguous()


@portable_operator("portable_decay_gate")
def portable_decay_gate(
    a: Tensor, log_rate: Tensor, bias: Tensor, spans: Tensor | None, of: int
) -> Tensor:
    """Return g."""
    found = -exp_of(widen(log_rate)) * softplus(widen(a) + widen(bias))
    return round_once(found, found.dtype).contiguous()


@portable_operator("portable_decay_gate_backward")
def portable_decay_gate_backward(
    grad: Tensor, a: Tensor, log_rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da, and the terms of the gradients of log_rate and of bias, one row per token."""
    x, rate = widen(a) + widen(bias), exp_of(widen(log_rate))
    upstream = widen(grad)
    by_rate = upstream * (-rate * softplus(x))
    by_bias = (upstream * -rate) * elementary.sigmoid(x.contiguous())[0]
    return round_once(by_bias, a.dtype), by_rate.contiguous(), by_bias.contiguous()


def register_sigmoid(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        return operator(grad, ctx.saved_tensors[0])  # type: ignore[no-any-return]

    def fake(*given: Tensor) -> Tensor:
        return given[-1].new_empty(given[-1].shape)

    register_operator("sigmoid_gate", prefix, fake, backward, setup_context)
    register_operator("sigmoid_gate", f"{prefix}_backward", fake)


def register_decay(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.of, ctx.share = inputs[4], share_in_force()

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, log_rate, bias, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        da, *terms = operator(grad, a, log_rate, bias)
        found = []
        for wanted, parameter, rows in zip(
            ctx.needs_input_grad[1:3], (log_rate, bias), terms, strict=True
        ):
            total = sum_over_samples(rows, spans, ctx.of) if wanted else None
            dtype = described_dtype(parameter.dtype, spans, ctx.of)
            found.append(None if total is None else as_partial(round_once(total, dtype), ctx.share))
        return da, *found, None, None

    def fake(a: Tensor, *_: Any) -> Tensor:
        return a.new_empty(a.shape, dtype=accumulation_dtype(a.dtype))

    register_operator("decay_gate", prefix, fake, backward, setup_context)
    register_operator(
        "decay_gate",
        f"{prefix}_backward",
        lambda grad, a, *_: (a.new_empty(a.shape), fake(a), fake(a)),
    )


GATES = "isobit.ops.delta_rule.triton_gates"
# Elementwise operations of torch have one result: a native kernel would change no bits.
declare("sigmoid_gate", register_sigmoid, native=False, triton=GATES)
declare("decay_gate", register_decay, native=False, triton=GATES)
