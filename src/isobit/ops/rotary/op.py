"""The rotary embedding: the public function, its torch operators and their gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops.arguments import WITH_GPU, check_tensors, refuse_shape
from isobit.ops.registration import declare, launch, portable_operator, register_operator
from isobit.ops.rotary import portable


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, which rotates the two halves of each head by the angles of its token.

    Computes low · cos − high · sin and high · cos + low · sin; each product is rounded to fp32, and the result once to
    the dtype of x.

    Args:
        x: Shape [..., heads, D], in fp32, bf16 or fp16; D is even.
        cos: Cosines for both halves, [..., D]. Leading axes are broadcast. fp32 with every x, since a bf16 cosine loses
            the position, or the dtype of x.
        sin: Sines in the shape of cos. Neither has a gradient.

    Returns:
        Tensor in the shape and dtype of x.

    Raises:
        ArgumentError: If shapes, dtypes or devices do not fit together, or cos or sin require a gradient.

    Example:
        >>> x = torch.randn(4, 2, 8)
        >>> angles = torch.outer(torch.arange(4.0), torch.rand(4)).repeat(1, 2)
        >>> whole = isobit.rotary(x, angles.cos(), angles.sin())
        >>> torch.equal(isobit.rotary(x[3:], angles[3:].cos(), angles[3:].sin()), whole[3:])
        True
    """
    check_tensors(WITH_GPU, x=x)
    check_angles(x, cos, sin)
    sizes = (x.shape[:-2].numel(), x.shape[-2], x.shape[-1])
    return launch("rotary", sizes, x, cos, sin)  # type: ignore[no-any-return]


def check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise unless there are a cosine and a sine for every element of a head."""
    check_tensors(WITH_GPU, cos=cos, sin=sin)
    if x.dim() < 2 or x.shape[-1] % 2:
        refuse_shape("x", x, "[..., heads, D], D even", "pass one head as x.unsqueeze(-2)")
    if cos.dtype not in (x.dtype, torch.float32) or cos.device != x.device:
        raise ArgumentError(
            expected=f"cos and sin of float32 or {x.dtype}, on {x.device}",
            received=f"{cos.dtype} on {cos.device}",
            remedy="compute and keep them in float32",
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
            "pass both halves, one row of angles per token",
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
    """Register shapes and gradients of one executor's operators."""

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
    return portable.rotary(x, cos, sin)


@portable_operator("portable_rotary_backward")
def portable_rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return portable.rotary_backward(grad, cos, sin)


declare("rotary", register_formulas, triton="isobit.ops.rotary.triton")
