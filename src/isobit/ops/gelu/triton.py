"""The Triton executor of GELU. All tensors of a kernel have SIZE elements; a program computes BLOCK of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import logistic, normal_share, round_once, sigmoid
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run_elements


@triton.jit
def tanh_argument(x: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return x bounded, the argument of the logistic function (which at 2z is (1 + tanh z) / 2), and its slope."""
    near = tl.where(x > 32.0, 32.0, x)
    near = tl.where(near < -32.0, -32.0, near)
    square = near * near
    argument = near * (square * 0.07135481387376785 + 1.5957691669464111)
    return near, argument, square * 0.21406444907188416 + 1.5957691669464111


@triton.jit(do_not_specialize=["size"])
def gelu(
    x: tl.tensor, y: tl.tensor, size: tl.tensor, TANH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Compute y = x times the standard normal distribution function at x, or its approximation by tanh."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    if TANH:
        _, argument, _ = tanh_argument(value)
        _, denominator = logistic(argument)
        result = tl.div_rn(value, denominator)
    else:
        share, _ = normal_share(value)
        result = value * share
    tl.store(y + at, round_once(result, y.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def gelu_grad(
    grad: tl.tensor,
    x: tl.tensor,
    dx: tl.tensor,
    size: tl.tensor,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute dx = grad · the derivative at x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    if TANH:
        near, argument, inner = tanh_argument(value)
        s, rest = sigmoid(argument)
        slope = s * (near * (rest * inner) + 1.0)
    else:
        share, density = normal_share(value)
        slope = value * density + share
    tl.store(dx + at, round_once(upstream * slope, dx.dtype.element_ty), mask=at < size)


@triton_operator("gelu")
def triton_gelu(x: Tensor, tanh: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("gelu", gelu, (x,), (y,), TANH=tanh)
    return y


@triton_operator("gelu_backward")
def triton_gelu_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("gelu_backward", gelu_grad, (grad, x), (dx,), TANH=tanh)
    return dx
