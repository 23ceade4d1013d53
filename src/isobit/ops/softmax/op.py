"""The softmax operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.softmax import portable


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x - max) / Σ exp(x - max) along `dim`, with bits that depend on that row of x alone.

    fp32, bf16 and fp16, summed in fp32 and rounded once. A row that holds a NaN or +inf, or only -inf, is NaN.
    """
    return along_axis("softmax", x, dim)


def along_axis(name: str, x: Tensor, dim: int) -> Tensor:
    """A function of rows, `isobit::<name>` or its portable form, with `dim` as the rows' axis."""
    check_tensors(x=x)
    check_axis(x, dim)
    last = dim in (-1, x.dim() - 1)
    rows = x if last else x.movedim(dim, -1)
    y = launch(name, rows_and_columns(rows), rows)
    return y if last else y.movedim(-1, dim)  # type: ignore[no-any-return]


def check_axis(x: Tensor, dim: int) -> None:
    """An axis of x, or a refusal."""
    if x.dim() < 1:
        refuse_shape("x", x, "[..., n]", "pass x.reshape(1)")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            expected=f"dim from {-x.dim()} to {x.dim() - 1}, as x is {list(x.shape)}",
            received=f"dim = {dim!r}",
            remedy="name an axis of x",
        )


# ---- gradients: one definition for both executors -------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def backward_with(prefix: str) -> Any:
    """The gradient, by the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, y)  # type: ignore[no-any-return]

    return backward


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators, whose gradient needs the output alone."""
    public = prefix.removeprefix("portable_")
    register_operator(
        public, prefix, lambda x: x.new_empty(x.shape), backward_with(prefix), setup_context
    )
    register_operator(public, f"{prefix}_backward", lambda grad, y: y.new_empty(y.shape))


@portable_operator("portable_softmax")
def portable_softmax(x: Tensor) -> Tensor:
    """y over the last axis."""
    return portable.softmax(x)


@portable_operator("portable_softmax_backward")
def portable_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """dx over the last axis."""
    return portable.softmax_backward(grad, y)


declare("softmax", register_formulas)
