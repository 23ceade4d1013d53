"""The linear operator: its sums as torch operators, their gradients, and the public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobit.isolation import keeping_subnormals
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.linear import portable
from isobit.ops.registration import declare, portable_operator, register_operator
from isobit.ops.share import (
    as_partial,
    check_default,
    check_share,
    check_subtree,
    described_dtype,
    gradient_dtype,
    share_in_force,
)
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, samples: Samples | None = None
) -> Tensor:
    """x · weightᵀ + bias, with bits that depend on each row, its sample and the global batch alone.

    x is [..., K], weight [N, K], bias [N]; fp32, bf16 and fp16, summed in fp32 and rounded once.
    `samples` says which rows form which sample; by default [B, T, K] is B samples, [T, K] one.
    """
    return linear_with_packed(x, weight, bias, samples, None)


def linear_with_packed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    samples: Samples | None,
    packed: Tensor | None,
) -> Tensor:
    """The same, with a packed form of the weight that is known to be current."""
    x, weight, bias = cast_for_autocast(x, weight, bias)
    check_tensors(x=x, weight=weight, bias=bias)
    check_linear(x, weight, bias)
    spans, of = describe(samples, x, weight, bias)
    native = dispatch.is_native(x.dtype)
    if dispatch.is_recording():
        dispatch.record("linear", native, x.dtype, (x.shape[:-1].numel(), *reversed(weight.shape)))
    if native:
        return torch.ops.isobit.linear(x, weight, bias, spans, packed, of)  # type: ignore[no-any-return]
    return torch.ops.isobit.portable_linear(x, weight, bias, spans, of)  # type: ignore[no-any-return]


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ before it is rounded to x's dtype, without a gradient: the logits that log-probabilities are of."""
    check_tensors(x=x, weight=weight)
    check_linear(x, weight, None)
    if dispatch.is_native(x.dtype):
        return torch.ops.isobit.linear_roots(x.detach(), weight.detach(), x.shape[-1], 0)[0]  # type: ignore[no-any-return]
    sum_products = keeping_subnormals(portable.sum_products)
    total = sum_products(
        FeaturePlan(x.shape[-1]).segments, portable.widen(x), portable.widen(weight)
    )[0]
    return total.reshape(*x.shape[:-1], weight.shape[0])


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The shapes of a linear layer, or a refusal."""
    if weight.dim() != 2:
        refuse_shape("weight", weight, "[N, K]", "pass a matrix, outputs first")
    outputs, inputs = weight.shape
    if x.dim() < 1 or x.shape[-1] != inputs:
        expected = f"[..., {inputs}], as weight is {[outputs, inputs]}"
        refuse_shape("x", x, expected, "make the last axis of x and of weight the same")
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != outputs):
        refuse_shape("bias", bias, f"[{outputs}]", "pass one bias per row of weight")


def spans_of(samples: Samples, x: Tensor) -> Tensor:
    """(first row, rows) of each sample, as the operators take it."""
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    if rows != samples.rows:
        expected = f"[..., K] with {samples.rows} rows, as samples say"
        refuse_shape("x", x, expected, "describe all rows of this call, padding included")
    return torch.tensor(samples.spans, dtype=torch.int64, device=x.device).reshape(-1, 2)


def describe(
    samples: Samples | None, tokens: Tensor, *parameters: Tensor | None
) -> tuple[Tensor | None, int]:
    """The samples as the operators take them, spans and the size of the global batch, once gradients may be taken."""
    if samples is None:
        check_default(tokens, *parameters)
        return None, 0
    check_share(samples, *parameters)
    return spans_of(samples, tokens), samples.of


def cast_for_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What torch.autocast does to a linear layer's inputs."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    dtype = torch.get_autocast_dtype("cpu")
    return tuple(None if t is None else t.to(dtype) for t in tensors)


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, spans = inputs[:4]
    ctx.save_for_backward(x, weight, spans)
    ctx.of, ctx.arity, ctx.has_bias = inputs[-1], len(inputs), bias is not None
    ctx.share = share_in_force()


def backward_with(prefix: str) -> Any:
    """The gradient, by the operators `isobit::<prefix>_input_grad` and so on."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, spans = ctx.saved_tensors
        ops, want, share = torch.ops.isobit, ctx.needs_input_grad, ctx.share
        weight_grad, bias_grad = (
            getattr(ops, f"{prefix}_{kind}_grad") for kind in ("weight", "bias")
        )
        return (
            getattr(ops, f"{prefix}_input_grad")(grad, weight) if want[0] else None,
            as_partial(weight_grad(grad, x, spans, ctx.of), share) if want[1] else None,
            as_partial(bias_grad(grad, spans, ctx.of), share) if ctx.has_bias and want[2] else None,
            *[None] * (ctx.arity - 3),
        )

    return backward


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""

    def empty_gradient(
        grad: Tensor, shape: tuple[int, ...], spans: Tensor | None, of: int
    ) -> Tensor:
        return grad.new_empty(shape, dtype=described_dtype(grad.dtype, spans, of))

    fakes: dict[str, Callable[..., Tensor]] = {
        "": lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
        "_input_grad": lambda grad, weight: grad.new_empty((*grad.shape[:-1], weight.shape[1])),
        "_weight_grad": lambda grad, x, spans, of=0: empty_gradient(
            grad, (grad.shape[-1], x.shape[-1]), spans, of
        ),
        "_bias_grad": lambda grad, spans, of=0: empty_gradient(grad, (grad.shape[-1],), spans, of),
    }
    for suffix, fake in fakes.items():
        formulas = () if suffix else (backward_with(prefix), setup_context)
        register_operator("linear", f"{prefix}{suffix}", fake, *formulas)


# ---- the portable executor's operators ------------------------------------------------------------------


@portable_operator("portable_linear")
def portable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, spans: Tensor | None, of: int = 0
) -> Tensor:
    """y over K."""
    segments = FeaturePlan(x.shape[-1]).segments
    total = portable.sum_products(segments, portable.widen(x), portable.widen(weight))[0]
    if bias is not None:
        total = total + bias.to(total.dtype)
    return portable.round_once(total, x.dtype).reshape(*x.shape[:-1], weight.shape[0])


@portable_operator("portable_linear_input_grad")
def portable_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """dX over N."""
    segments = FeaturePlan(grad.shape[-1]).segments
    left, right = portable.widen(grad), portable.widen(weight).t()
    total = portable.sum_products(segments, left, right)[0]
    return portable.round_once(total, grad.dtype).reshape(*grad.shape[:-1], weight.shape[1])


@portable_operator("portable_linear_weight_grad")
def portable_weight_grad(grad: Tensor, x: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    """dW over the samples."""
    samples = whole_samples(grad, spans, of)
    total = portable.sum_products(samples.segments, portable.widen(grad).t(), portable.widen(x).t())
    return only_root(total, x.dtype, samples)


@portable_operator("portable_linear_bias_grad")
def portable_bias_grad(grad: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    """db over the samples."""
    samples = whole_samples(grad, spans, of)
    return only_root(portable.sum_rows(samples.segments, portable.widen(grad)), grad.dtype, samples)


def only_root(roots: Tensor, dtype: torch.dtype, samples: Samples) -> Tensor:
    """The one root, rounded if it is the whole sum's; zero where there is no sample."""
    total = roots[0] if len(roots) else roots.sum(0)
    return portable.round_once(total, gradient_dtype(dtype, len(samples.spans), samples.of))


def whole_samples(rows: Tensor, spans: Tensor | None, of: int = 0) -> Samples:
    """The samples of a call: the whole global batch, or a share of `of`, told as if at its front.

    A subtree's value does not depend on where in the tree it stands; anything but one subtree is refused.
    """
    if spans is not None:
        known = tuple((int(start), int(length)) for start, length in spans.tolist())
        share = Samples(known, rows.shape[:-1].numel(), 0, of or len(known))
        if share.is_share:
            check_subtree(share)
        return share
    length = rows.shape[-2] if rows.dim() > 1 else 1
    total = rows.shape[:-1].numel()
    return Samples.packed([length] * (total // length if length else 0))


declare("linear", register_formulas)
