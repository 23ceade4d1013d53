"""The select_rows operator: its torch operators, their gradient, and the public function."""

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
from isobit.ops.select_rows import portable


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return chosen rows of x, each at most once, with a gradient that is a copy and no sum.

    Indexing of torch adds the gradients of rows that are chosen twice, in an order of its own, so autograd treats
    every index as a sum. Here rows are unique, and the bits of y and dx are those of x and of the upstream gradient. A
    head that reads one token of each sample selects these rows first.

    Args:
        x: Shape [..., n], in fp32, bf16 or fp16.
        rows: Numbers of different rows, [R], int64 or int32. Rows are counted over all axes of x but the last: token t
            of sample b of x [B, T, n] is b · T + t.

    Returns:
        Tensor [R, n] in the dtype of x.

    Raises:
        ArgumentError: If a row does not exist or is chosen twice, or shapes, dtypes or devices do not fit together.

    Example:
        >>> hidden = torch.arange(12.0).reshape(2, 3, 2)
        >>> isobit.select_rows(hidden, torch.tensor([1, 5]))  # token 1 of sample 0, token 2 of sample 1
        tensor([[ 2.,  3.],
                [10., 11.]])
    """
    check_tensors(WITH_GPU, x=x)
    if x.dim() < 1 or not x.shape[-1]:
        refuse_shape("x", x, "[..., n], n ≥ 1", "pass rows as the last axis of x")
    if (
        not isinstance(rows, Tensor)
        or rows.dtype not in (torch.int64, torch.int32)
        or rows.dim() != 1
        or rows.device != x.device
    ):
        received = (
            f"{rows.dtype} of shape {list(rows.shape)} on {rows.device}"
            if isinstance(rows, Tensor)
            else type(rows).__name__
        )
        raise ArgumentError(
            expected=f"rows as an int64 or int32 tensor [R] on {x.device}",
            received=received,
            remedy="pass torch.tensor([b * T + t, ...]); (mask.reshape(-1)).nonzero().flatten() of a mask",
        )
    return launch("select_rows", rows_and_columns, x, rows.long())  # type: ignore[no-any-return]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows = inputs
    ctx.shape = list(x.shape)
    ctx.save_for_backward(rows)


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        operator = getattr(torch.ops.isobit, f"{prefix}_backward")
        return operator(grad, rows, ctx.shape), None

    register_operator(
        "select_rows",
        prefix,
        lambda x, rows: x.new_empty((rows.shape[0], x.shape[-1])),
        backward,
        setup_context,
    )
    register_operator(
        "select_rows", f"{prefix}_backward", lambda grad, rows, shape: grad.new_empty(shape)
    )


@portable_operator("portable_select_rows")
def portable_select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen rows."""
    return portable.select_rows(x, rows)


@portable_operator("portable_select_rows_backward")
def portable_select_rows_backward(grad: Tensor, rows: Tensor, shape: list[int]) -> Tensor:
    """Return dx."""
    return portable.select_rows_backward(grad, rows, shape)


# The portable executor only moves memory, so a native kernel would not be faster.
declare("select_rows", register_formulas, native=False, triton="isobit.ops.select_rows.triton")
