"""The SwiGLU operator: the public function, its torch operators and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.swiglu import portable


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU, silu(gate) · up, computed in fp32 and rounded once; the same result at every position and stride.

    Args:
        gate: Any shape, in fp32, bf16 or fp16.
        up: The shape and dtype of gate; nothing is broadcast.

    Returns:
        Tensor in the shape and dtype of gate.

    Raises:
        ArgumentError: If the shapes, dtypes or devices differ.

    Example:
        >>> gate, up = torch.randn(2, 1001)
        >>> torch.equal(isobit.swiglu(gate, up)[1000:], isobit.swiglu(gate[1000:], up[1000:]))
        True
    """
    check_tensors(WITH_GPU, gate=gate, up=up)
    if gate.shape != up.shape:
        refuse_shape(
            "up", up, str(list(gate.shape)), "pass gate and up of one shape; nothing is broadcast"
        )
    return launch("swiglu", rows_and_columns, gate, up)  # type: ignore[no-any-return]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def register_formulas(prefix: str) -> None:
    """Register shapes and gradients of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, gate, up)  # type: ignore[no-any-return]

    def like_both(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.new_empty(gate.shape), up.new_empty(up.shape)

    register_operator(
        "swiglu", prefix, lambda gate, up: gate.new_empty(gate.shape), backward, setup_context
    )
    register_operator("swiglu", f"{prefix}_backward", like_both)


@portable_operator("portable_swiglu")
def portable_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return portable.swiglu(gate, up)


@portable_operator("portable_swiglu_backward")
def portable_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return portable.swiglu_backward(grad, gate, up)


declare("swiglu", register_formulas, triton="isobit.ops.swiglu.triton")
