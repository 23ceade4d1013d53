"""The GELU operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors
from isobit.ops.gelu import portable
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU, x times the standard normal distribution function at x, with one result per value at every position.

    Args:
        x: Any shape, in fp32, bf16 or fp16. Computed in fp32 and rounded once.
        approximate: "none", or "tanh" for the approximation by tanh.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If x is not a supported tensor, or `approximate` is another word.

    Example:
        >>> x = torch.randn(1001)
        >>> torch.equal(isobit.gelu(x)[1000:], isobit.gelu(x[1000:]))
        True
    """
    check_tensors(WITH_GPU, x=x)
    if approximate not in ("none", "tanh"):
        raise ArgumentError(
            expected='approximate = "none" or "tanh"',
            received=repr(approximate),
            remedy='pass "tanh" for what models call gelu_new or gelu_pytorch_tanh',
        )
    return launch("gelu", rows_and_columns, x, approximate == "tanh")  # type: ignore[no-any-return]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.tanh = inputs[1]


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, x, ctx.tanh), None

    register_operator("gelu", prefix, lambda x, tanh: x.new_empty(x.shape), backward, setup_context)
    register_operator("gelu", f"{prefix}_backward", lambda grad, x, tanh: x.new_empty(x.shape))


@portable_operator("portable_gelu")
def portable_gelu(x: Tensor, tanh: bool) -> Tensor:
    return portable.gelu(x, tanh)


@portable_operator("portable_gelu_backward")
def portable_gelu_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    return portable.gelu_backward(grad, x, tanh)


declare("gelu", register_formulas, triton="isobit.ops.gelu.triton")
