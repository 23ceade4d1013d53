"""Norms: RMSNorm with and without a weight or an offset of its weight, and LayerNorm; of rows, and of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.integrations.transformers.layout import current_layout
from isobit.ops.arguments import widen_for_autocast
from isobit.ops.layer_norm.op import layer_norm
from isobit.ops.portable.samples import describe
from isobit.ops.registration import PREFIXES, executor_of
from isobit.ops.rms_norm.op import rms_norm
from isobit.ops.share import as_partial, share_in_force
from isobit.order.samples import Samples
from isobit.parallel.tensor.head_norm import head_norm
from isobit.parallel.tensor.shard import tp_group_of


@dataclass(frozen=True)
class NormFormula:
    """The formula of a norm. Names are those of the module's attributes.

    rms: x / sqrt(mean(x²) + eps) · (offset + weight); layer: the same of x − mean(x), plus bias.
    """

    kind: str = "rms"  # or layer
    eps: str | float = "eps"
    weight: str | None = "weight"
    bias: str | None = None
    offset: float = 0.0

    def epsilon(self, module: Any) -> float:
        """Return eps of a module."""
        return self.eps if isinstance(self.eps, float) else float(getattr(module, self.eps))

    def __str__(self) -> str:
        centred = "x" if self.kind == "rms" else "(x − mean)"
        square = "x²" if self.kind == "rms" else "(x − mean)²"
        eps = self.eps if isinstance(self.eps, str) else f"{self.eps:g}"
        text = f"{centred} / sqrt(mean({square}) + {eps})"
        if self.weight is not None:
            text += f" · ({self.offset:g} + {self.weight})" if self.offset else f" · {self.weight}"
        return text + ("" if self.bias is None else f" + {self.bias}")


def forward_norm(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Compute a norm of rows [B, T, n], or of heads: [B, T, H, n] or its transpose [B, H, T, n]."""
    if x.dim() == 4:
        rows, swapped = tokens_first(x)
        found = norm_of_heads(formula, module, rows)
        return found.transpose(1, 2) if swapped else found
    samples, eps = current_layout().samples, formula.epsilon(module)
    if formula.kind == "layer":
        bias = None if formula.bias is None else getattr(module, formula.bias)
        return layer_norm(x, weight_of(formula, module, x), bias, eps, samples=samples)
    if formula.offset:
        return offset_norm(formula, module, x, samples, heads=False)
    return rms_norm(x, weight_of(formula, module, x), eps, samples=samples)


def norm_of_heads(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Compute RMSNorm of each head, [B, T, H, n]; the weight's gradient also sums over heads."""
    if formula.kind == "layer":
        refuse_layer_norm_of_heads(f"{list(x.shape)}, in a module of type {type(module).__name__}")
    samples, tp_group, eps = current_layout().samples, tp_group_of(module), formula.epsilon(module)
    if tp_group is not None:
        return head_norm(x, module.weight, eps, tp_group=tp_group, samples=samples)
    if formula.offset:
        return offset_norm(formula, module, x, samples, heads=True)
    return rms_norm(x, weight_of(formula, module, x), eps, samples=samples, heads=True)


def refuse_layer_norm_of_heads(where: str) -> NoReturn:
    """Raise: isobit.layer_norm has no sum over heads for its weight."""
    raise UnsupportedError(
        expected="LayerNorm of rows, [batch, tokens, features]",
        received=f"LayerNorm of heads: {where}",
        remedy="isobit.layer_norm has no sum over heads for its weight; RMSNorm of heads is supported",
    )


def weight_of(formula: NormFormula, module: Any, x: Tensor) -> Tensor:
    """Return the weight; ones where a norm has none."""
    if formula.weight is None:
        return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    weight: Tensor = getattr(module, formula.weight)
    return weight


def tokens_first(x: Tensor) -> tuple[Tensor, bool]:
    """Return heads as [B, T, H, n], and whether x was [B, H, T, n].

    Where there are as many heads as tokens, the strides tell: heads are made by a view of [B, T, H · n].
    """
    width = current_layout().positions.shape[1]
    swapped = x.shape[2] == width and (x.shape[1] != width or x.stride(1) < x.stride(2))
    return (x.transpose(1, 2).contiguous(), True) if swapped else (x, False)


def offset_norm(
    formula: NormFormula, module: Any, x: Tensor, samples: Samples | None, heads: bool
) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · (offset + weight) in fp32, rounded once."""
    assert formula.weight is not None
    x, weight = widen_for_autocast(x, getattr(module, formula.weight))
    spans, of = describe(samples, x.select(-2, 0) if heads else x, weight)
    how = formula.epsilon(module), formula.offset, spans, of, heads
    found: Tensor = _OffsetNorm.apply(x, weight, *how)  # type: ignore[no-untyped-call]
    return found


class _OffsetNorm(torch.autograd.Function):
    """RMSNorm of fp32 with the weight plus an offset, whose gradient goes to the weight itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        spans: Tensor | None,
        of: int,
        heads: bool,
    ) -> Tensor:
        wide, sum_of = x.float().contiguous(), weight.float() + offset
        ctx.prefix = PREFIXES[executor_of("rms_norm", wide.dtype, (wide, sum_of))]
        operator = getattr(torch.ops.isobit, f"{ctx.prefix}rms_norm")
        found, scales = operator(wide, sum_of, eps, spans, heads, of)
        ctx.save_for_backward(wide, sum_of, scales, spans)
        ctx.of, ctx.heads, ctx.share = of, heads, share_in_force()
        ctx.dtypes = x.dtype, weight.dtype
        return found.to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide, sum_of, scales, spans = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{ctx.prefix}rms_norm_backward")
        dx, dweight = operator(
            grad.float().contiguous(), wide, sum_of, scales, spans, ctx.heads, ctx.of
        )
        whole = spans is None or ctx.of in (0, spans.shape[0])
        into = dweight.to(ctx.dtypes[1]) if whole else dweight  # a share's is not rounded
        return dx.to(ctx.dtypes[0]), as_partial(into, ctx.share), *[None] * 5
