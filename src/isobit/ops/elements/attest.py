"""Holds the loaded SiLU, GELU, SwiGLU and rotary embedding against their portable executors, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.gelu import portable as gelu
from isobit.ops.linear.attest import wide_values
from isobit.ops.rotary import portable as rotary
from isobit.ops.silu import portable as silu
from isobit.ops.swiglu import portable as swiglu

# A body and a tail; D / 2 of the rotary's heads has both too.
EXTENT, HEADS, D = 77, 3, 42


def difference(dtype: torch.dtype) -> str | None:
    """Where outputs or gradients differ first, or None."""
    for name, found, expected in results(dtype):
        if not bits.equal(found, expected):
            return f"{name} at {list(found.shape)}"
    return None


def results(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(operator, native, portable), over the range where no result is a constant, and beyond."""
    ops, generator = torch.ops.isobit, torch.Generator().manual_seed(EXTENT)
    x, up, grad = (wide_values((5, EXTENT), dtype, generator) for _ in range(3))
    x[0] = torch.linspace(-100, 100, EXTENT, dtype=torch.float32)
    special = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e4, -1e4, 15.9, -13.1)
    x[1, ::9] = torch.tensor(special, dtype=torch.float32)
    yield "silu", ops.silu(x), silu.silu(x)
    yield "silu's gradient", ops.silu_backward(grad, x), silu.silu_backward(grad, x)
    for tanh in (False, True):
        yield "gelu", ops.gelu(x, tanh), gelu.gelu(x, tanh)
        yield "gelu's gradient", ops.gelu_backward(grad, x, tanh), gelu.gelu_backward(grad, x, tanh)
    yield "swiglu", ops.swiglu(x, up), swiglu.swiglu(x, up)
    for found, expected in zip(
        ops.swiglu_backward(grad, x, up), swiglu.swiglu_backward(grad, x, up), strict=True
    ):
        yield "swiglu's gradient", found, expected
    x = wide_values((5, HEADS, D), dtype, generator)
    angles = torch.randn(5, D, generator=generator, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    yield "rotary", ops.rotary(x, cos, sin), rotary.rotary(x, cos, sin)
    yield "rotary's gradient", ops.rotary_backward(x, cos, sin), rotary.rotary_backward(x, cos, sin)
