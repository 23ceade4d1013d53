"""The RMSNorm operator: the public function, its torch operators and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors, widen_for_autocast
from isobit.ops.portable.norms import check_norm, empty_statistics
from isobit.ops.portable.samples import describe, whole_samples
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.rms_norm import portable
from isobit.ops.rms_norm.offset import check_offset, offset_norm
from isobit.ops.share import described_dtype, marking_partials
from isobit.order.samples import Samples


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    samples: Samples | Tensor | None = None,
    heads: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """RMSNorm over the last axis, x / sqrt(mean(x²) + eps) · (offset + weight), that does not depend on the batch.

    Unlike torch.nn.functional.rms_norm there is no `normalized_shape`: it is the shape of weight.

    Args:
        x: Shape [..., n], in fp32, bf16 or fp16. Computed in fp32 and rounded once.
        weight: Shape [n], in the dtype of x.
        eps: Added to the mean square.
        samples: The rows of each sample, as `Samples` or cumulative lengths (`cu_seqlens`), for the gradient of weight.
            By default x [B, T, n] is B samples.
        heads: x is [..., T, H, n], a norm of each head, and the samples describe tokens. The gradient of weight sums
            the tokens of each head of a sample, then the heads.
        offset: Added to weight in fp32, without rounding the sum to the dtype; 1.0 for the norms of Gemma.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> x, weight = torch.randn(8, 64), torch.ones(64)
        >>> torch.equal(isobit.rms_norm(x, weight)[:1], isobit.rms_norm(x[:1], weight))
        True
    """
    x, weight = widen_for_autocast(x, weight)
    check_tensors(WITH_GPU, x=x, weight=weight)
    check_norm(x, weight, eps, 2 if heads else 1)
    check_offset(offset)
    spans, of = describe(samples, x.select(-2, 0) if heads else x, weight)
    if offset:
        return offset_norm(x, weight, eps, spans, heads, of, float(offset))
    given = (x, weight, eps, spans, heads, of)
    return marking_partials(launch("rms_norm", rows_and_columns, *given)[0])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, spans, ctx.heads, ctx.of = inputs
    ctx.save_for_backward(x, weight, output[1], spans)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, scales, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        dx, dweight = operator(grad, x, weight, scales, spans, ctx.heads, ctx.of)
        return dx, dweight, None, None, None, None

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def fake(
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        scales: Tensor,
        spans: Tensor | None,
        heads: bool,
        of: int = 0,
    ) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), weight.new_empty(
            weight.shape, dtype=described_dtype(weight.dtype, spans, of)
        )

    register_operator(
        "rms_norm",
        prefix,
        lambda x, *_: (x.new_empty(x.shape), empty_statistics(x)),
        backward_with(prefix),
        setup_context,
    )
    register_operator("rms_norm", f"{prefix}_backward", fake)


@portable_operator("portable_rms_norm")
def portable_rms_norm(
    x: Tensor, weight: Tensor, eps: float, spans: Tensor | None, heads: bool, of: int = 0
) -> tuple[Tensor, Tensor]:
    return portable.rms_norm(x, weight, eps)


@portable_operator("portable_rms_norm_backward")
def portable_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    spans: Tensor | None,
    heads: bool,
    of: int = 0,
) -> tuple[Tensor, Tensor]:
    samples = whole_samples(grad.select(-2, 0) if heads else grad, spans, of)
    return portable.rms_norm_backward(grad, x, weight, scales, samples, x.shape[-2] if heads else 0)


declare("rms_norm", register_formulas, triton="isobit.ops.rms_norm.triton")
