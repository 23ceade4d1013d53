"""The softmax operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.softmax import portable


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax along an axis, in which each row depends on that row of x and on nothing else in the batch.

    Args:
        x: Any shape, in fp32, bf16 or fp16. Summed in fp32 and rounded once.
        dim: The axis to normalize.

    Returns:
        Tensor in the shape and dtype of x. A row with a NaN or +inf, or with only -inf, is NaN.

    Raises:
        ArgumentError: If x is not a supported tensor, or has no such axis.

    Example:
        >>> x = torch.randn(8, 1000)
        >>> torch.equal(isobit.softmax(x)[:1], isobit.softmax(x[:1]))
        True
    """
    return along_axis("softmax", x, dim)


def along_axis(name: str, x: Tensor, dim: int) -> Tensor:
    """Apply the operator `name`, a function of rows, along the axis `dim`."""
    check_tensors(WITH_GPU, x=x)
    check_axis(x, dim)
    last = dim in (-1, x.dim() - 1)
    rows = x if last else x.movedim(dim, -1)
    y = launch(name, rows_and_columns, rows)
    return y if last else y.movedim(-1, dim)  # type: ignore[no-any-return]


def check_axis(x: Tensor, dim: int) -> None:
    """Raise unless `dim` is an axis of x."""
    if x.dim() < 1:
        refuse_shape("x", x, "[..., n]", "pass x.reshape(1)")
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError(
            expected=f"dim from {-x.dim()} to {x.dim() - 1}, as x is {list(x.shape)}",
            received=f"dim = {dim!r}",
            remedy="pass an axis of x",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def backward_with(prefix: str) -> Any:
    """Return the backward that calls the operator `isobit::<prefix>_backward`."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, y)  # type: ignore[no-any-return]

    return backward


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators, for a gradient that needs only the output."""
    public = prefix.removeprefix("portable_").removeprefix("triton_")
    register_operator(
        public, prefix, lambda x: x.new_empty(x.shape), backward_with(prefix), setup_context
    )
    register_operator(public, f"{prefix}_backward", lambda grad, y: y.new_empty(y.shape))


@portable_operator("portable_softmax")
def portable_softmax(x: Tensor) -> Tensor:
    return portable.softmax(x)


@portable_operator("portable_softmax_backward")
def portable_softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    return portable.softmax_backward(grad, y)


declare("softmax", register_formulas, triton="isobit.ops.softmax.triton")
