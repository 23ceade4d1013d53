"""Compare the native exact sums with the portable executor: digits and roundings, on hard values."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.exact_sum import portable

SIZES = (1, 37, 2049)


def difference(dtype: torch.dtype) -> str | None:
    """Return what differs first, or None."""
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        normal = torch.randn(size, generator=generator, dtype=torch.float32)
        x = torch.ldexp(normal, torch.randint(-140, 120, (size,), generator=generator)).to(dtype)
        x = torch.where(x.isfinite(), x, 1.0)
        for squared in (False, True):
            state = torch.ops.isobit.exact_state([x], squared)
            if not bits.equal(state, portable.state([x], squared)):
                return f"the exact sum of {size} {'squares' if squared else 'values'}"
            for kind in (torch.float32, torch.float64):
                if not bits.equal(
                    torch.ops.isobit.exact_round(state, kind), portable.round_state(state, kind)
                ):
                    return f"the rounding of an exact sum to {kind}"
    return None
