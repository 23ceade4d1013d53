"""The SwiGLU operator: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.registration import (
    declare,
    launch,
    portable_operator,
    register_operator,
    rows_and_columns,
)
from isobit.ops.swiglu import portable


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up: elements have one result at every position, stride and tail. fp32 inside, rounded once."""
    check_tensors(gate=gate, up=up)
    if gate.shape != up.shape:
        refuse_shape(
            "up", up, str(list(gate.shape)), "pass gate and up of one shape; nothing is broadcast"
        )
    return launch("swiglu", rows_and_columns(gate), gate, up)  # type: ignore[no-any-return]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""

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
    """y, element by element."""
    return portable.swiglu(gate, up)


@portable_operator("portable_swiglu_backward")
def portable_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and of up."""
    return portable.swiglu_backward(grad, gate, up)


declare("swiglu", register_formulas)
