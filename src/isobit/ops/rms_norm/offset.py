"""RMSNorm whose weight is a difference from a constant, as Gemma's: the factor is offset + weight.

[Note: why there is no kernel for it] The factor of a 16-bit weight is a number of fp32 and must not be rounded to 16
bits. The operators of RMSNorm compute 16-bit rows in fp32 and round once, so the same rows as fp32, with the factor
as an fp32 weight, give the same numbers before that rounding, forward and backward. Casting back is the rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.derivatives import check_derivatives
from isobit.ops.portable.sums import round_once
from isobit.ops.registration import PREFIXES, executor_of
from isobit.ops.share import accumulation_dtype, as_partial, described_dtype, share_in_force


def check_offset(offset: float) -> None:
    """Raise unless the offset is a finite number."""
    # Not math.isfinite: torch.compile(dynamic=True) cannot trace it.
    if not isinstance(offset, (float, int)) or not -math.inf < offset < math.inf:
        raise ArgumentError(
            expected="offset as a finite number",
            received=f"{offset!r}",
            remedy="pass 1.0 for a norm that multiplies by 1 + weight, or leave it out",
        )


def offset_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    spans: Tensor | None,
    heads: bool,
    of: int,
    offset: float,
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · (offset + weight) of checked arguments."""
    check_derivatives("rms_norm", (x, weight))
    return OffsetNorm.apply(x, weight, eps, spans, heads, of, offset)  # type: ignore[no-untyped-call,no-any-return]


def widen(tensor: Tensor) -> Tensor:
    """Return the values in the dtype that they are summed in."""
    return tensor.to(accumulation_dtype(tensor.dtype))


class OffsetNorm(torch.autograd.Function):
    """Compute RMSNorm with the factor offset + weight, on the executor that serves the rows as fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        spans: Tensor | None,
        heads: bool,
        of: int,
        offset: float,
    ) -> Tensor:
        """Return y in the dtype of x."""
        wide, factor = widen(x), widen(weight) + offset
        prefix = PREFIXES[executor_of("rms_norm", wide.dtype, (wide, factor))]
        operator = getattr(torch.ops.isobit, f"{prefix}rms_norm")
        y, scales = operator(wide, factor, eps, spans, heads, of)
        ctx.save_for_backward(x, weight, scales, spans)
        ctx.prefix, ctx.heads, ctx.of, ctx.offset = prefix, heads, of, offset
        ctx.share = share_in_force()
        return round_once(y, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return dx and dweight; the latter is not rounded where the samples are a share."""
        x, weight, scales, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{ctx.prefix}rms_norm_backward")
        given = (widen(grad), widen(x), widen(weight) + ctx.offset, scales, spans)
        dx, dweight = operator(*given, ctx.heads, ctx.of)
        dweight = round_once(dweight, described_dtype(weight.dtype, spans, ctx.of))
        return round_once(dx, x.dtype), as_partial(dweight, ctx.share), *(None,) * 5
