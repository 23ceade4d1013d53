"""The functions of one element that tests go through, each with stock's, and a gradient that moves with its value."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.gelu.op import gelu
from isobit.ops.silu.op import silu
from isobit.ops.swiglu.op import swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
UP = 1.3671875  # in every dtype

FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu by tanh": lambda x: gelu(x, "tanh"),
    "swiglu": lambda x: swiglu(x, torch.full_like(x, UP)),
    "swiglu's up": lambda x: swiglu(torch.full_like(x, -UP), x),
}
STOCK = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x) * UP,
    "swiglu's up": lambda x: F.silu(torch.full_like(x, -UP)) * x,
}
of_each = pytest.mark.parametrize("name", FUNCTIONS)


def gradient(function, x: Tensor) -> Tensor:
    """From an upstream gradient that is a function of x too, so that it moves with x."""
    leaf = x.detach().requires_grad_()
    upstream = torch.where(x.isfinite(), x, 1.0).sign() * 1.75
    return torch.autograd.grad(function(leaf), leaf, upstream)[0]
