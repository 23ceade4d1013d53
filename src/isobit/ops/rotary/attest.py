"""Compare the native rotary embedding with its portable executor, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.portable.hard_inputs import wide_values
from isobit.ops.rotary import portable

HEADS, D = 3, 42  # half a head has a vector body and a tail


def difference(dtype: torch.dtype) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(D)
    x = wide_values((5, HEADS, D), dtype, generator)
    angles = torch.randn(5, D, generator=generator, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if not bits.equal(torch.ops.isobit.rotary(x, cos, sin), portable.rotary(x, cos, sin)):
        return "rotary"
    found = torch.ops.isobit.rotary_backward(x, cos, sin)
    return None if bits.equal(found, portable.rotary_backward(x, cos, sin)) else "rotary's gradient"
