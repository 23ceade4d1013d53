"""Compare an executor's GELU with the portable one, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.gelu import portable
from isobit.ops.portable.hard_inputs import special_values, wide_values

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    x = special_values((5, EXTENT), dtype, generator)
    grad = wide_values((5, EXTENT), dtype, generator)
    for tanh in (False, True):
        if not bits.equal(call("gelu", x, tanh), portable.gelu(x, tanh)):
            return f"gelu with tanh={tanh}"
        found = call("gelu_backward", grad, x, tanh)
        if not bits.equal(found, portable.gelu_backward(grad, x, tanh)):
            return f"gelu's gradient with tanh={tanh}"
    return None
