"""The layer norm: its torch operators, their gradients, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import check_tensors, refuse_shape, widen_for_autocast
from isobit.ops.layer_norm import portable
from isobit.ops.portable.norms import check_norm, empty_statistics
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.share import as_partial, described_dtype, share_in_force
from isobit.order.samples import Samples


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    samples: Samples | None = None,
) -> Tensor:
    """((x − mean) / sqrt(variance + eps)) · weight + bias over the last axis; a row's bits depend on nothing else.

    x is [..., n], weight and bias [n]; fp32, bf16 and fp16, computed in fp32 and rounded once. Mean first, then the
    variance of what is left. Gradients of weight and bias sum over the samples; by default [B, T, n] is B samples.
    """
    x, weight, bias = widen_for_autocast(x, weight, bias)
    check_tensors(x=x, weight=weight, bias=bias)
    check_norm(x, weight, eps, 1)
    if bias is not None and bias.shape != weight.shape:
        refuse_shape("bias", bias, f"{list(weight.shape)}", "pass one bias per feature")
    spans, of = describe(samples, x, weight, bias)
    return launch("layer_norm", rows_and_columns(x), x, weight, bias, eps, spans, of)[0]  # type: ignore[no-any-return]


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, spans, ctx.of = inputs
    ctx.has_bias, ctx.share = bias is not None, share_in_force()
    ctx.save_for_backward(x, weight, *output[1:], spans)


def backward_with(prefix: str) -> Any:
    """The gradient, by the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = getattr(torch.ops.isobit, f"{prefix}_backward")(
            grad, *ctx.saved_tensors, ctx.of
        )
        dbias = as_partial(dbias, ctx.share) if ctx.has_bias else None
        return dx, as_partial(dweight, ctx.share), dbias, None, None, None

    return backward


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""

    def fake(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        means: Tensor,
        scales: Tensor,
        spans: Tensor | None,
        of: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = weight.new_empty(weight.shape, dtype=described_dtype(weight.dtype, spans, of))
        return x.new_empty(x.shape), gradient, torch.empty_like(gradient)

    register_operator(
        "layer_norm",
        prefix,
        lambda x, *_: (x.new_empty(x.shape), empty_statistics(x), empty_statistics(x)),
        backward_with(prefix),
        setup_context,
    )
    register_operator("layer_norm", f"{prefix}_backward", fake)


@portable_operator("portable_layer_norm")
def portable_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, spans: Tensor | None, of: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, means, scales) over the last axis."""
    return portable.layer_norm(x, weight, bias, eps)


@portable_operator("portable_layer_norm_backward")
def portable_layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    means: Tensor,
    scales: Tensor,
    spans: Tensor | None,
    of: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias)."""
    return portable.layer_norm_backward(
        grad, x, weight, means, scales, whole_samples(grad, spans, of)
    )


declare("layer_norm", register_formulas)
