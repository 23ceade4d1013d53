"""The Triton executor of SiLU. All tensors of a kernel have SIZE elements; a program computes BLOCK of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import logistic, round_once, sigmoid_and_slope
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run_elements


@triton.jit(do_not_specialize=["size"])
def silu(x: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute y = x / (1 + e^-x)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    _, denominator = logistic(value)
    result = round_once(tl.div_rn(value, denominator), y.dtype.element_ty)
    tl.store(y + at, result, mask=at < size)


@triton.jit(do_not_specialize=["size"])
def silu_grad(
    grad: tl.tensor, x: tl.tensor, dx: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute dx = grad · the derivative at x."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, slope = sigmoid_and_slope(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
    upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(dx + at, round_once(upstream * slope, dx.dtype.element_ty), mask=at < size)


@triton_operator("silu")
def triton_silu(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("silu", silu, (x,), (y,))
    return y


@triton_operator("silu_backward")
def triton_silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("silu_backward", silu_grad, (grad, x), (dx,))
    return dx
