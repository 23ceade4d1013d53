"""The Triton executor of the gates of linear attention: functions of one element, in the chains of gates.py.

a, g and grad are [SIZE / H, H], log_rate and bias [H], all contiguous; sums and terms are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.elementary import exp_nonpositive, log_positive, round_once, sigmoid
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, run_elements, target_of
from isobit.ops.gpu.tiles import tile_of


@triton.jit(do_not_specialize=["size"])
def logistic_gate(x: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute y = 1 / (1 + e^-x)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, _ = sigmoid(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(y + at, round_once(value, y.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def logistic_gate_grad(
    grad: tl.tensor, x: tl.tensor, dx: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Compute dx = grad · s · (1 − s)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value, rest = sigmoid(tl.load(x + at, mask=at < size, other=0.0).to(tl.float32))
    upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(dx + at, round_once(upstream * (value * rest), dx.dtype.element_ty), mask=at < size)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|; see `softplus` in gates.py."""
    e = exp_nonpositive(-tl.abs(x))
    u = e + 1.0
    rest = tl.where(u == 1.0, e, log_positive(u) * tl.div_rn(e, u - 1.0))
    return tl.where(x > 0.0, x, 0.0) + tl.where(x != x, x, rest)


@triton.jit
def rate_of(log_rate: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Return −e^log_rate of heads, −0 where it is too small for a number: -x of Triton is 0 − x."""
    x = tl.load(log_rate + column).to(tl.float32)
    return tl.where(x > 87.25, float("inf"), exp_nonpositive(x)) * -1.0


@triton.jit(do_not_specialize=["size"])
def decay(
    a: tl.tensor,
    log_rate: tl.tensor,
    bias: tl.tensor,
    g: tl.tensor,
    size: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute g = −e^log_rate · softplus(a + bias)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = at % H
    x = tl.load(a + at, mask=at < size, other=0.0).to(tl.float32)
    x = x + tl.load(bias + column).to(tl.float32)
    found = rate_of(log_rate, column) * softplus(x)
    tl.store(g + at, round_once(found, tl.float32), mask=at < size)


@triton.jit(do_not_specialize=["size"])
def decay_grad(
    grad: tl.tensor,
    a: tl.tensor,
    log_rate: tl.tensor,
    bias: tl.tensor,
    da: tl.tensor,
    by_rate: tl.tensor,
    by_bias: tl.tensor,
    size: tl.tensor,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store da, and the terms of the gradients of log_rate and bias."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = at % H
    x = tl.load(a + at, mask=at < size, other=0.0).to(tl.float32)
    x = x + tl.load(bias + column).to(tl.float32)
    rate = rate_of(log_rate, column)
    upstream = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(by_rate + at, upstream * (rate * softplus(x)), mask=at < size)
    value, _ = sigmoid(x)
    of_bias = (upstream * rate) * value
    tl.store(by_bias + at, of_bias, mask=at < size)
    tl.store(da + at, round_once(of_bias, da.dtype.element_ty), mask=at < size)


@triton_operator("sigmoid_gate")
def triton_sigmoid_gate(x: Tensor) -> Tensor:
    """Return the logistic function."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("sigmoid_gate", logistic_gate, (x,), (y,))
    return y


@triton_operator("sigmoid_gate_backward")
def triton_sigmoid_gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return dx."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run_elements("sigmoid_gate", logistic_gate_grad, (grad, x), (dx,))
    return dx


def run_heads(kernel: object, given: tuple[Tensor, ...], *out: Tensor) -> None:
    """Launch a kernel over the elements of out [..., H]."""
    size, tile = out[0].numel(), tile_of("decay_gate", out[0].dtype, target_of(out[0]))
    tensors = (tensor.contiguous() for tensor in given)
    how = {"H": out[0].shape[-1], "BLOCK": tile.size, "warps": tile.warps}
    run(kernel, (-(-size // tile.size),), *tensors, *out, size, **how)


@triton_operator("decay_gate")
def triton_decay_gate(
    a: Tensor, log_rate: Tensor, bias: Tensor, spans: Tensor | None, of: int
) -> Tensor:
    """Return g."""
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    run_heads(decay, (a, log_rate, bias), g)
    return g


@triton_operator("decay_gate_backward")
def triton_decay_gate_backward(
    grad: Tensor, a: Tensor, log_rate: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da, and the terms of the gradients of log_rate and of bias."""
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    terms = [torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2)]
    run_heads(decay_grad, (grad, a, log_rate, bias), da, *terms)
    return da, terms[0], terms[1]
