"""Compare an executor's exact sums with the portable one: digits and roundings, on hard values."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.exact_sum import portable

SIZES = (1, 37, 2049)


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        normal = torch.randn(size, generator=generator, dtype=torch.float32)
        x = torch.ldexp(normal, torch.randint(-140, 120, (size,), generator=generator)).to(dtype)
        x = torch.where(x.isfinite(), x, 1.0)
        for squared in (False, True):
            state = call("exact_state", [x], squared)
            if not bits.equal(state, portable.state([x], squared)):
                return f"the exact sum of {size} {'squares' if squared else 'values'}"
            for kind in (torch.float32, torch.float64):
                if not bits.equal(
                    call("exact_round", state, kind), portable.round_state(state, kind)
                ):
                    return f"the rounding of an exact sum to {kind}"
    return None


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, or None; digits are compared by what they round to, as carries are not propagated."""
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        normal = torch.randn(size, generator=generator, dtype=torch.float32)
        x = torch.ldexp(normal, torch.randint(-140, 120, (size,), generator=generator)).to(dtype)
        for given in (x, torch.where(x.isfinite(), x, 1.0)):
            if not bits.equal(call("exact_sum", given), portable.exact_sum(given)):
                return f"the exact sum of {size} values"
            for squared in (False, True):
                states = call("exact_state", given, squared), portable.state([given], squared)
                found, wanted = (portable.round_state(s, torch.float64) for s in states)
                if not bits.equal(found, wanted):
                    return f"the digits of {size} {'squares' if squared else 'values'}"
    return None
