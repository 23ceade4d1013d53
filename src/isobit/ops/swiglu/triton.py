"""The Triton executor of SwiGLU. All tensors of a kernel have SIZE elements; a program computes BLOCK of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import logistic, round_once, sigmoid_and_slope
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run_elements


@triton.jit(do_not_specialize=["size"])
def swiglu(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute y = gate / (1 + e^-gate) · up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    _, denominator = logistic(value)
    result = tl.div_rn(value, denominator) * factor
    tl.store(y + at, round_once(result, y.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def swiglu_grad(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Compute dgate = (grad · up) · the derivative at gate, and dup = grad · (gate · s)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gate + at, mask=at < size, other=0.0).to(tl.float32)
    factor = tl.load(up + at, mask=at < size, other=0.0).to(tl.float32)
    upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    s, slope = sigmoid_and_slope(value)
    of_gate = round_once(upstream * factor * slope, dgate.dtype.element_ty)
    of_up = round_once(upstream * (value * s), dup.dtype.element_ty)
    tl.store(dgate + at, of_gate, mask=at < size)
    tl.store(dup + at, of_up, mask=at < size)


@triton_operator("swiglu")
def triton_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    run_elements("swiglu", swiglu, (gate, up), (y,))
    return y


@triton_operator("swiglu_backward")
def triton_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
    run_elements("swiglu_backward", swiglu_grad, (grad, gate, up), (dgate, dup))
    return dgate, dup
