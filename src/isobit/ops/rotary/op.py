"""The rotary embedding: its torch operators, their gradient, and the public function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.rotary import portable


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., heads, D] with each head's halves turned by its token's angles; cos and sin [..., D] have both halves.

    low · cos - high · sin and high · cos + low · sin, each product rounded to fp32, and the result once to x's dtype.
    cos and sin may be fp32 whatever x is, as a bf16 cosine loses the position; their leading axes may be fewer than
    x's, or of size 1, as in torch. They have no gradient.
    """
    check_tensors(x=x)
    check_angles(x, cos, sin)
    sizes = (x.shape[:-2].numel(), x.shape[-2], x.shape[-1])
    return launch("rotary", sizes, x, cos, sin)  # type: ignore[no-any-return]


def check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """A cosine and a sine for every element of a head, or a refusal."""
    check_tensors(cos=cos, sin=sin)
    if x.dim() < 2 or x.shape[-1] % 2:
        refuse_shape("x", x, "[..., heads, D], D even", "pass one head as x.unsqueeze(-2)")
    if cos.dtype not in (x.dtype, torch.float32) or cos.device != x.device:
        raise ArgumentError(
            expected=f"cos and sin of float32 or {x.dtype}, on {x.device}",
            received=f"{cos.dtype} on {cos.device}",
            remedy="compute them in float32, and keep them so",
        )
    if sin.shape != cos.shape:
        refuse_shape("sin", sin, str(list(cos.shape)), "pass cos and sin of the same angles")
    shape = (*x.shape[:-2], x.shape[-1])
    missing = len(shape) - cos.dim()
    fits = 0 <= missing < len(shape) and cos.shape[-1] == shape[-1]
    if not fits or any(
        a not in (1, b) for a, b in zip(cos.shape[:-1], shape[missing:-1], strict=True)
    ):
        refuse_shape(
            "cos",
            cos,
            f"{list(shape)}, as x is {list(x.shape)}",
            "pass both halves, an angle a token",
        )
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        raise ArgumentError(
            expected="cos and sin that need no gradient",
            received="requires_grad = True",
            remedy="pass cos.detach(), sin.detach()",
        )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def register_formulas(prefix: str) -> None:
    """Shapes, gradients and refusals of one executor's operators."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return getattr(torch.ops.isobit, f"{prefix}_backward")(grad, *ctx.saved_tensors), None, None

    register_operator(
        "rotary", prefix, lambda x, cos, sin: x.new_empty(x.shape), backward, setup_context
    )
    register_operator(
        "rotary", f"{prefix}_backward", lambda grad, cos, sin: grad.new_empty(grad.shape)
    )


@portable_operator("portable_rotary")
def portable_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y of [..., heads, D]."""
    return portable.rotary(x, cos, sin)


@portable_operator("portable_rotary_backward")
def portable_rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """dx."""
    return portable.rotary_backward(grad, cos, sin)


declare("rotary", register_formulas)
