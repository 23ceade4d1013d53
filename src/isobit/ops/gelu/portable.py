"""The portable executor of GELU, exact and with tanh: the operations of csrc/elements.cpp in plain torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, special_values, wide_values
from isobit.ops.portable.elementary import logistic, normal_share, sigmoid
from isobit.ops.portable.sums import round_once, widen

BOUND = 32.0  # beyond it the logistic function is 0 or 1
LINEAR = 2 * math.sqrt(2 / math.pi)
CUBIC = LINEAR * 0.044715


def tanh_argument(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x bounded, the argument of the logistic function (which at 2z is (1 + tanh z) / 2), and its slope."""
    near = torch.where(x > BOUND, BOUND, x)
    near = torch.where(near < -BOUND, -BOUND, near)
    square = near * near
    return near, near * (square * CUBIC + LINEAR), square * (3 * CUBIC) + LINEAR


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Return x times the standard normal distribution function at x, or its approximation by tanh."""
    wide = widen(x).contiguous()
    y = wide / logistic(tanh_argument(wide)[1])[1] if tanh else wide * normal_share(wide)[0]
    return round_once(y, x.dtype)


def gelu_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """Return dx."""
    wide = widen(x).contiguous()
    if tanh:
        near, argument, inner = tanh_argument(wide)
        s, rest = sigmoid(argument)
        slope = s * (near * (rest * inner) + 1.0)
    else:
        share, density = normal_share(wide)
        slope = wide * density + share
    return round_once(widen(grad) * slope, x.dtype).contiguous()


# Compare an executor's GELU with the portable one, bit for bit.

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    x = special_values((5, EXTENT), dtype, generator)
    grad = wide_values((5, EXTENT), dtype, generator)
    for tanh in (False, True):
        if not bits.equal(call("gelu", x, tanh), gelu(x, tanh)):
            return f"gelu with tanh={tanh}"
        found = call("gelu_backward", grad, x, tanh)
        if not bits.equal(found, gelu_backward(grad, x, tanh)):
            return f"gelu's gradient with tanh={tanh}"
    return None
