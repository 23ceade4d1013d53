"""Compare an executor's rotary embedding with the portable one, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.portable.hard_inputs import wide_values
from isobit.ops.rotary import portable

HEADS, D = 3, 42  # half a head has a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(D)
    x = wide_values((5, HEADS, D), dtype, generator)
    angles = torch.randn(5, D, generator=generator, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if not bits.equal(call("rotary", x, cos, sin), portable.rotary(x, cos, sin)):
        return "rotary"
    found = call("rotary_backward", x, cos, sin)
    return None if bits.equal(found, portable.rotary_backward(x, cos, sin)) else "rotary's gradient"
