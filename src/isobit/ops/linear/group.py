"""Linear layers that share an input: separate outputs, and one sum for the gradient of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.arguments import WITH_GPU, cast_for_autocast, check_tensors
from isobit.ops.derivatives import (
    check_derivatives,
    refuse_forward_mode,
    refuse_second_order,
    refuse_vmap,
)
from isobit.ops.gpu.executors import is_asked_for
from isobit.ops.linear.op import check_linear, sizes_of
from isobit.ops.portable.samples import describe
from isobit.ops.registration import launch
from isobit.ops.share import as_partial, share_in_force
from isobit.order.samples import Samples


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    groups: int = 1,
    samples: Samples | Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute several linear layers of one input, such as the projections to queries, keys and values.

    Each output is that of isobit.linear. The gradient of x is one sum over the rows of all weights; with separate
    calls of isobit.linear, autograd would add three gradients in the order of the graph. The sum runs group by group:
    the first of `groups` equal parts of each weight's rows, then the second of each, so that a tensor-parallel rank
    that owns whole groups (a key head with its queries) owns whole segments of the sum.

    Args:
        x: Input of shape [..., K].
        weights: Matrices of shape [N_i, K].
        biases: One bias [N_i] or None per weight; by default none.
        groups: A divisor of every N_i: the number of key heads for queries, keys and values.
        samples: The rows of each sample; see isobit.linear.

    Returns:
        One tensor [..., N_i] per weight.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or `groups` does not divide every N_i.
        UnsupportedError: If the samples are a share and gradients are taken outside isobit.parallel.Gradients.

    Example:
        >>> x, gate, up = torch.randn(2, 5, 16), torch.randn(32, 16), torch.randn(32, 16)
        >>> y_gate, y_up = isobit.linear_group(x, [gate, up])
        >>> torch.equal(y_up, isobit.linear(x, up))
        True
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
        check_tensors(WITH_GPU, x=x, weight=weight, bias=bias)
        check_linear(x, weight, bias)
        check_groups(weight, groups)
    check_derivatives("linear_group", (x, *weights, *given))
    described = describe(samples, x, *weights, *given)
    arguments = (x, *described, groups, len(weights), *weights, *given)
    # `apply` reads a signature at each call, which was a third of the time of a small model's decode step.
    if not torch.is_grad_enabled():
        return _Group.forward(*arguments)
    outputs: tuple[Tensor, ...] = _Group.apply(*arguments)  # type: ignore
    return outputs


def check_groups(weight: Tensor, groups: int) -> None:
    """Raise unless `groups` divides the rows of the weight."""
    if groups < 1 or weight.shape[0] % groups:
        raise ArgumentError(
            expected="a number of groups that divides the rows of every weight",
            received=f"{groups} groups of {weight.shape[0]} rows",
            remedy="use the number of key heads for queries, keys and values, or 1",
        )


def interleave(tensors: Sequence[Tensor], axis: int, groups: int) -> Tensor:
    """Join tensors along an axis group by group: the first part of each, then the second part of each."""
    shares = [t.chunk(groups, axis) for t in tensors]
    return torch.cat([share[g] for g in range(groups) for share in shares], axis)


def prefix_of(x: Tensor) -> str:
    """Return the prefix of the operators that serve a call."""
    if is_asked_for((x,)):
        return "triton_linear"
    return "linear" if dispatch.is_native(x.dtype) else "portable_linear"


class _Group(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, spans: Any, of: int, groups: int, count: int, *parameters: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        return tuple(
            launch("linear", sizes_of(x, w), x, w, b, spans, None, of)
            for w, b in zip(weights, biases, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, spans, ctx.of, ctx.groups, count, *parameters = inputs
        ctx.save_for_backward(x, spans, *parameters[:count])
        ctx.prefix = prefix_of(x)
        ctx.has_bias = [bias is not None for bias in parameters[count:]]
        ctx.share = share_in_force()

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
            input_grad = getattr(ops, f"{ctx.prefix}_input_grad")(*joined)
        weight_grad, bias_grad = (
            getattr(ops, f"{ctx.prefix}_{kind}_grad") for kind in ("weight", "bias")
        )
        return (
            input_grad,
            *[None] * 4,
            *[
                as_partial(weight_grad(g, x, spans, ctx.of), ctx.share) if want[5 + i] else None
                for i, g in enumerate(grads)
            ],
            *[
                as_partial(bias_grad(g, spans, ctx.of), ctx.share)
                if has and want[5 + count + i]
                else None
                for i, (g, has) in enumerate(zip(grads, ctx.has_bias, strict=True))
            ],
        )
