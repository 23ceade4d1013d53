"""The SiLU operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.silu import portable


def silu(x: Tensor) -> Tensor:
    """SiLU, x / (1 + e^-x), that gives a value the same result at every position and stride.

    Args:
        x: Any shape, in fp32, bf16 or fp16. Computed in fp32 and rounded once.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If x is not a supported tensor.

    Example:
        >>> x = torch.randn(1001)
        >>> torch.equal(isobit.silu(x)[1000:], isobit.silu(x[1000:]))
        True
    """
    check_tensors(WITH_GPU, x=x)
    return launch("silu", rows_and_columns, x)  # type: ignore[no-any-return]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, x)  # type: ignore[no-any-return]

    register_operator("silu", prefix, lambda x: x.new_empty(x.shape), backward, setup_context)
    register_operator("silu", f"{prefix}_backward", lambda grad, x: x.new_empty(x.shape))


@portable_operator("portable_silu")
def portable_silu(x: Tensor) -> Tensor:
    return portable.silu(x)


@portable_operator("portable_silu_backward")
def portable_silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return portable.silu_backward(grad, x)


declare("silu", register_formulas, triton="isobit.ops.silu.triton")
