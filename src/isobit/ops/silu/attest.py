"""Compare an executor's SiLU with the portable one, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.portable.hard_inputs import special_values, wide_values
from isobit.ops.silu import portable

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    x = special_values((5, EXTENT), dtype, generator)
    grad = wide_values((5, EXTENT), dtype, generator)
    if not bits.equal(call("silu", x), portable.silu(x)):
        return "silu"
    found = call("silu_backward", grad, x)
    return None if bits.equal(found, portable.silu_backward(grad, x)) else "silu's gradient"
