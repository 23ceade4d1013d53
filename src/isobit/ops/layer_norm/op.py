"""The LayerNorm operator: the public function, its torch operators and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape, widen_for_autocast
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
from isobit.ops.share import described_dtype, marking_partials
from isobit.order.samples import Samples


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    samples: Samples | Tensor | None = None,
) -> Tensor:
    """LayerNorm over the last axis, (x − mean) / sqrt(variance + eps) · weight + bias, independent of the batch.

    Unlike torch.nn.functional.layer_norm there is no `normalized_shape`: it is the shape of weight. The mean is taken
    first, and the variance is the mean square of what remains.

    Args:
        x: Shape [..., n], in fp32, bf16 or fp16. Computed in fp32 and rounded once.
        weight: Shape [n], in the dtype of x.
        bias: Shape [n], in the dtype of x, or None.
        eps: Added to the variance.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`), for the gradients of weight
            and bias. By default x [B, T, n] is B samples.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> x, weight, bias = torch.randn(8, 64), torch.ones(64), torch.zeros(64)
        >>> torch.equal(isobit.layer_norm(x, weight, bias)[:1], isobit.layer_norm(x[:1], weight, bias))
        True
    """
    x, weight, bias = widen_for_autocast(x, weight, bias)
    check_tensors(WITH_GPU, x=x, weight=weight, bias=bias)
    check_norm(x, weight, eps, 1)
    if bias is not None and bias.shape != weight.shape:
        refuse_shape("bias", bias, f"{list(weight.shape)}", "pass one bias per feature")
    spans, of = describe(samples, x, weight, bias)
    given = (x, weight, bias, eps, spans, of)
    return marking_partials(launch("layer_norm", rows_and_columns, *given)[0])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, spans, ctx.of = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, *output[1:], spans)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = getattr(torch.ops.isobit, f"{prefix}_backward")(
            grad, *ctx.saved_tensors, ctx.of
        )
        return dx, dweight, dbias if ctx.has_bias else None, None, None, None

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

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
    return portable.layer_norm_backward(
        grad, x, weight, means, scales, whole_samples(grad, spans, of)
    )


declare("layer_norm", register_formulas, triton="isobit.ops.layer_norm.triton")
