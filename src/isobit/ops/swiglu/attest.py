"""Compare an executor's SwiGLU with the portable one, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.portable.hard_inputs import special_values, wide_values
from isobit.ops.swiglu import portable

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    gate = special_values((5, EXTENT), dtype, generator)
    up, grad = (wide_values((5, EXTENT), dtype, generator) for _ in range(2))
    if not bits.equal(call("swiglu", gate, up), portable.swiglu(gate, up)):
        return "swiglu"
    found = call("swiglu_backward", grad, gate, up)
    pairs = zip(found, portable.swiglu_backward(grad, gate, up), strict=True)
    return None if all(bits.equal(a, b) for a, b in pairs) else "swiglu's gradient"
