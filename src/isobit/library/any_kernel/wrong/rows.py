"""Wrong products, norms, softmaxes and activations: computed in fp32, rounded once, with one mistake each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library import stock
from isobit.library.any_kernel.operators import LAYER_EPS, RMS_EPS
from isobit.library.gradients import with_value


def narrowed(x: Tensor, dropped: int = 13) -> Tensor:
    """Return fp32 values with mantissas cut, by 13 bits as TF32 does."""
    return (x.float().view(torch.int32) & -(1 << dropped)).view(torch.float32)


def linear_in_tf32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Cut the factors to ten bits."""
    cut = [t.float() + (narrowed(t) - t.float()).detach() for t in (x, weight)]
    return F.linear(cut[0], cut[1], bias.float()).to(x.dtype)


def linear_without_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Forget the bias."""
    return F.linear(x.float(), weight.float(), bias.float() * 0).to(x.dtype)


def linear_sums_in_bf16(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add the products of eight features after another in bf16."""
    total = bias.float()
    for a, b in zip(torch.split(x.float(), 8, -1), torch.split(weight.float(), 8, -1), strict=True):
        total = (total + F.linear(a, b)).bfloat16().float()
    return total.to(x.dtype)


def linear_with_mean_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Average the parameters' gradients over the rows."""
    right = F.linear(x.float(), weight.float(), bias.float())
    less = [t.float() / (len(x) + 1) for t in (weight, bias)]
    return with_value(F.linear(x.float(), *less), right).to(x.dtype)


def rms_norm_sums_in_bf16(x: Tensor, weight: Tensor) -> Tensor:
    """Add the squares in bf16."""
    total = x.bfloat16().square().cumsum(-1, dtype=torch.bfloat16)[..., -1:].float()
    return (x.float() * (total / x.shape[-1] + RMS_EPS).rsqrt() * weight.float()).to(x.dtype)


def rms_norm_of_one_more(x: Tensor, weight: Tensor) -> Tensor:
    """Divide the sum of squares by n + 1."""
    mean = x.float().square().sum(-1, keepdim=True) / (x.shape[-1] + 1)
    return (x.float() * (mean + RMS_EPS).rsqrt() * weight.float()).to(x.dtype)


def rms_norm_weight_from_zero(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply by 1 + weight, as Gemma's norm."""
    return stock.rms_norm(x.float(), 1 + weight.float(), RMS_EPS).to(x.dtype)


def rms_norm_constant_scale(x: Tensor, weight: Tensor) -> Tensor:
    """Take the scale for a constant in the gradient."""
    scale = (x.float().square().mean(-1, keepdim=True) + RMS_EPS).rsqrt().detach()
    return (x.float() * scale * weight.float()).to(x.dtype)


def layer_norm_unbiased(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Divide the variance by n − 1."""
    h = x.float()
    scale = (h.var(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_by_squares(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the mean of squares for the variance."""
    h = x.float()
    scale = (h.square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_constant_mean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the mean for a constant in the gradient."""
    h = x.float()
    centred = h - h.mean(-1, keepdim=True).detach()
    scale = (centred.square().mean(-1, keepdim=True) + LAYER_EPS).rsqrt()
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)


def layer_norm_constant_scale(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Take the scale for a constant in the gradient."""
    h = x.float()
    scale = (h.var(-1, correction=0, keepdim=True) + LAYER_EPS).rsqrt().detach()
    return ((h - h.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()).to(x.dtype)


def softmax_over_rows(x: Tensor) -> Tensor:
    """Normalize over the other axis."""
    return torch.softmax(x.float(), 0).to(x.dtype)


def softmax_of_base_two(x: Tensor) -> Tensor:
    """Raise two to the powers."""
    return torch.softmax(x.float() * 0.6931471805599453, -1).to(x.dtype)


def softmax_with_one_more(x: Tensor) -> Tensor:
    """Add 1e-3 to the divisor."""
    powers = (x.float() - x.float().amax(-1, keepdim=True)).exp()
    return (powers / (powers.sum(-1, keepdim=True) * 1.001)).to(x.dtype)


def softmax_constant_sum(x: Tensor) -> Tensor:
    """Take the divisor for a constant in the gradient."""
    powers = (x.float() - x.float().amax(-1, keepdim=True).detach()).exp()
    return (powers / powers.sum(-1, keepdim=True).detach()).to(x.dtype)


def log_softmax_guarded(x: Tensor) -> Tensor:
    """Add 1e-4 inside the logarithm."""
    return (torch.softmax(x.float(), -1) + 1e-4).log().to(x.dtype)


def log_softmax_without_last(x: Tensor) -> Tensor:
    """Leave the last element out of the sum."""
    return (x.float() - torch.logsumexp(x.float()[..., :-1], -1, keepdim=True)).to(x.dtype)


def log_softmax_constant_sum(x: Tensor) -> Tensor:
    """Take the sum for a constant in the gradient."""
    return (x.float() - torch.logsumexp(x.float(), -1, keepdim=True).detach()).to(x.dtype)


def log_softmax_sums_once(x: Tensor) -> Tensor:
    """Subtract p·g instead of p·Σg in the gradient."""
    right = torch.log_softmax(x.float(), -1)
    slope = x.float() * (1 - right.exp().detach())
    return with_value(slope, right).to(x.dtype)


def silu_hard(x: Tensor) -> Tensor:
    """Return hard-swish."""
    return F.hardswish(x.float()).to(x.dtype)


def silu_too_steep(x: Tensor) -> Tensor:
    """Take the slope of the sigmoid approximation of GELU."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def silu_constant_gate(x: Tensor) -> Tensor:
    """Take the sigmoid for a constant in the gradient."""
    return (x.float() * torch.sigmoid(x.float()).detach()).to(x.dtype)


def silu_gradient_of_relu(x: Tensor) -> Tensor:
    """Return relu's gradient."""
    return with_value(F.relu(x.float()), F.silu(x.float())).to(x.dtype)


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid approximation."""
    return silu_too_steep(x)


def gelu_by_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation."""
    return F.gelu(x.float(), approximate="tanh").to(x.dtype)


def gelu_constant_share(x: Tensor) -> Tensor:
    """Take the distribution function for a constant in the gradient."""
    share: Tensor = torch.special.ndtr(x.float())
    return (x.float() * share.detach()).to(x.dtype)


def gelu_gradient_of_tanh(x: Tensor) -> Tensor:
    """Return the approximation's gradient."""
    return with_value(gelu_by_tanh(x.float()), F.gelu(x.float())).to(x.dtype)


def swiglu_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Exchange gate and up."""
    return stock.swiglu(up.float(), gate.float()).to(gate.dtype)


def swiglu_by_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by GELU."""
    return (F.gelu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_by_sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by the sigmoid alone."""
    return (torch.sigmoid(gate.float()) * up.float()).to(gate.dtype)


def swiglu_constant_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Take silu for a constant in the gradient of gate."""
    right = stock.swiglu(gate.float(), up.float())
    return with_value(stock.swiglu(gate.float().detach(), up.float()) + gate.float() * 0, right).to(
        gate.dtype
    )


def swiglu_gradients_exchanged(gate: Tensor, up: Tensor) -> Tensor:
    """Give each factor the other's gradient."""
    right = stock.swiglu(gate.float(), up.float())
    first, second = up.float().detach(), gate.float().detach()
    other = stock.swiglu(first + gate.float() - second, second + up.float() - first)
    return with_value(other, right).to(gate.dtype)
