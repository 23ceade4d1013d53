"""The operators that dispatch rows to experts and combine them; each is the other's gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.experts import portable
from isobit.ops.experts.routes import Routes
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)


def dispatch_rows(x: Tensor, routes: Routes) -> Tensor:
    """Return the rows of all experts: a copy of a token's row for each expert that it goes to.

    The gradient of a token's row is the sum of those of its copies, in the order of isobit.combine.

    Args:
        x: The tokens, [..., n].
        routes: Their routes.

    Returns:
        Tensor [R, n]: the rows of expert 0 in the order of the tokens, then those of expert 1, …

    Raises:
        ArgumentError: If x does not have one row per routed token.

    Example:
        >>> routes = isobit.route(torch.tensor([[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]]), 2)
        >>> isobit.dispatch_rows(torch.tensor([[5.0], [7.0]]), routes).flatten()
        tensor([7., 5., 7., 5.])
    """
    check_tensors(WITH_GPU, x=x)
    tokens = len(routes.experts)
    if x.dim() < 2 or x.shape[:-1].numel() != tokens:
        refuse_shape("x", x, f"[..., n] with {tokens} rows", "pass the tokens that were routed")
    return launch(  # type: ignore[no-any-return]
        "dispatch_rows",
        rows_and_columns,
        x,
        routes.tokens,
        routes.experts,
        routes.places,
        routes.total,
    )


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """Return each token's sum of its experts' rows times their weights, by ascending expert id.

    Products and sums are in fp32, rounded once to the dtype of the rows. Experts are cut into segments, so that ranks
    which own whole segments of experts compute whole subtrees of the sum. A token that goes nowhere is +0.

    Args:
        rows: The rows of all experts, [R, n], in the order of isobit.dispatch_rows.
        routes: The routes of the tokens.

    Returns:
        Tensor [T, n], one row per token.

    Raises:
        ArgumentError: If there is not one row per route.

    Example:
        >>> routes = isobit.route(torch.tensor([[1.0, 1.0, 0.0]]), 2)
        >>> isobit.combine(torch.tensor([[2.0], [4.0]]), routes)
        tensor([[3.]])
    """
    check_tensors(WITH_GPU, rows=rows)
    check_tensors(WITH_GPU, weights=routes.weights)
    if rows.dim() != 2 or len(rows) != len(routes.tokens):
        refuse_shape(
            "rows", rows, f"[{len(routes.tokens)}, n]", "pass one row per route, as dispatched"
        )
    return launch(  # type: ignore[no-any-return]
        "combine",
        rows_and_columns,
        rows,
        routes.weights,
        routes.experts,
        routes.places,
        routes.tokens,
        routes.total,
    )


def setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, experts, places, ctx.count = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(experts, places)


def register_dispatch(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts, places = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        return operator(grad, experts, places, ctx.count).view(ctx.shape), *[None] * 4

    register_operator(
        "dispatch_rows",
        prefix,
        lambda x, tokens, *_: x.new_empty((tokens.shape[0], x.shape[-1])),
        backward,
        setup_dispatch,
    )
    register_operator(
        "dispatch_rows",
        f"{prefix}_backward",
        lambda grad, experts, *_: grad.new_empty((experts.shape[0], grad.shape[1])),
    )


def setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, _, places, tokens, _ = inputs
    ctx.save_for_backward(rows, weights, places, tokens)


def register_combine(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops.isobit, name)
        return *operator(grad, *ctx.saved_tensors), *[None] * 4

    # One gradient for both executors of the CPU: its sum over features is that of the executor of linear.
    name = "triton_combine_backward" if prefix == "triton_combine" else "portable_combine_backward"
    register_operator(
        "combine",
        prefix,
        lambda rows, weights, *_: rows.new_empty((weights.shape[0], rows.shape[1])),
        backward,
        setup_combine,
    )
    if prefix == "combine":
        return
    register_operator(
        "combine",
        name,
        lambda grad, rows, weights, *_: (
            rows.new_empty(rows.shape),
            weights.new_empty(weights.shape),
        ),
    )


@portable_operator("portable_dispatch_rows")
def portable_dispatch_rows(
    x: Tensor, tokens: Tensor, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return the rows of all experts."""
    return portable.dispatch_rows(x, tokens)


@portable_operator("portable_dispatch_rows_backward")
def portable_dispatch_rows_backward(
    grad: Tensor, experts: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return dx."""
    return portable.combine(grad, None, experts, places, count)


@portable_operator("portable_combine")
def portable_combine(
    rows: Tensor, weights: Tensor, experts: Tensor, places: Tensor, tokens: Tensor, count: int
) -> Tensor:
    """Return the sums of each token."""
    return portable.combine(rows, weights, experts, places, count)


@portable_operator("portable_combine_backward")
def portable_combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights."""
    return portable.combine_backward(grad, rows, weights, places, tokens)


declare("dispatch_rows", register_dispatch, triton="isobit.ops.experts.triton")
declare("combine", register_combine, triton="isobit.ops.experts.triton")
