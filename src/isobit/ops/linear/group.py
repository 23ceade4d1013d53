"""Linears that share an input: outputs of their own, and one sum for the input's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors
from isobit.ops.linear.op import cast_for_autocast, check_linear, describe
from isobit.ops.registration import (
    check_derivatives,
    refuse_forward_mode,
    refuse_second_order,
    refuse_vmap,
)
from isobit.ops.share import as_partial, share_in_force
from isobit.order.samples import Samples


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    groups: int = 1,
    samples: Samples | None = None,
) -> tuple[Tensor, ...]:
    """x · weightᵀ + bias for each weight, as isobit.linear; dX is one sum over all of their rows.

    Three linears of their own would have dX added by autograd, in graph order. Here its axis runs group by group: the
    first of `groups` equal shares of each weight's rows, then the second of each, so that a tensor-parallel rank, which
    holds whole groups (a key head with its queries), holds whole segments.
    """
    given = tuple(biases) if biases is not None else (None,) * len(weights)
    if len(given) != len(weights) or not weights:
        raise ArgumentError(
            expected="one or more weights, and a bias or None for each",
            received=f"{len(weights)} weights and {len(given)} biases",
            remedy="leave biases out where no layer has one",
        )
    x, *cast = cast_for_autocast(x, *weights, *given)
    weights, given = cast[: len(weights)], tuple(cast[len(weights) :])
    for weight, bias in zip(weights, given, strict=True):
        check_tensors(x=x, weight=weight, bias=bias)
        check_linear(x, weight, bias)
        check_groups(weight, groups)
    check_derivatives("linear_group", (x, *weights, *given))
    described = describe(samples, x, *weights, *given)
    native = dispatch.is_native(x.dtype)
    if dispatch.is_recording():
        for weight in weights:
            dispatch.record(
                "linear", native, x.dtype, (x.shape[:-1].numel(), *reversed(weight.shape))
            )
    outputs: tuple[Tensor, ...] = _Group.apply(
        x, *described, groups, native, len(weights), *weights, *given
    )  # type: ignore
    return outputs


def check_groups(weight: Tensor, groups: int) -> None:
    """Equal shares of the weight's rows."""
    if groups < 1 or weight.shape[0] % groups:
        raise ArgumentError(
            expected="a number of groups that divides the rows of every weight",
            received=f"{groups} groups of {weight.shape[0]} rows",
            remedy="use the number of key heads for queries, keys and values, or 1",
        )


def interleave(tensors: Sequence[Tensor], axis: int, groups: int) -> Tensor:
    """Group by group: the first share of each along the axis, then the second of each."""
    shares = [t.chunk(groups, axis) for t in tensors]
    return torch.cat([share[g] for g in range(groups) for share in shares], axis)


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, spans: Any, of: int, groups: int, native: bool, count: int, *parameters: Any
    ) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        extra = (None,) if native else ()  # packed forms are isobit.nn.Linear's
        operator = torch.ops.isobit.linear if native else torch.ops.isobit.portable_linear
        return tuple(operator(x, w, b, spans, *extra) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, spans, ctx.of, ctx.groups, native, count, *parameters = inputs
        ctx.save_for_backward(x, spans, *parameters[:count])
        ctx.prefix = "linear" if native else "portable_linear"
        ctx.has_bias, ctx.share = (
            [bias is not None for bias in parameters[count:]],
            share_in_force(),
        )

    jvp = staticmethod(refuse_forward_mode("linear_group"))
    vmap = staticmethod(refuse_vmap("linear_group"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, spans, *weights = ctx.saved_tensors
        check_derivatives("linear_group", grads)
        if any(grad.requires_grad for grad in grads) and torch.is_grad_enabled():
            refuse_second_order("linear_group")()
        want = ctx.needs_input_grad
        count, ops = len(weights), torch.ops.isobit
        input_grad = None
        if want[0] and ctx.prefix == "linear":
            input_grad = ops.linear_group_input_grad(list(grads), weights, ctx.groups)
        elif want[0]:
            joined = interleave(grads, -1, ctx.groups), interleave(weights, 0, ctx.groups)
            input_grad = ops.portable_linear_input_grad(*joined)
        weight_grad, bias_grad = (
            getattr(ops, f"{ctx.prefix}_{kind}_grad") for kind in ("weight", "bias")
        )
        return (
            input_grad,
            *[None] * 5,
            *[
                as_partial(weight_grad(g, x, spans, ctx.of), ctx.share) if want[6 + i] else None
                for i, g in enumerate(grads)
            ],
            *[
                as_partial(bias_grad(g, spans, ctx.of), ctx.share)
                if has and want[6 + count + i]
                else None
                for i, (g, has) in enumerate(zip(grads, ctx.has_bias, strict=True))
            ],
        )
