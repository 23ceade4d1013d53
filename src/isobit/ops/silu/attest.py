"""Compare the native SiLU with its portable executor, bit for bit."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.portable.hard_inputs import special_values, wide_values
from isobit.ops.silu import portable

EXTENT = 77  # a vector body and a tail


def difference(dtype: torch.dtype) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    x = special_values((5, EXTENT), dtype, generator)
    grad = wide_values((5, EXTENT), dtype, generator)
    if not bits.equal(torch.ops.isobit.silu(x), portable.silu(x)):
        return "silu"
    found = torch.ops.isobit.silu_backward(grad, x)
    return None if bits.equal(found, portable.silu_backward(grad, x)) else "silu's gradient"
