"""Compare an executor's RMSNorm with the portable one, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native, cases_for, spans_and_samples, wide_values
from isobit.ops.rms_norm import portable

# (tokens, heads, n): two leaves of tokens and a tail alone; one long segment of features; heads in segments of three.
CASES = ((270, 0, 7), (3, 0, 1025), (20, 6, 24))
GPU_CASES = ((270, 0, 2056), (20, 6, 24))
EPS = 1e-6


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for tokens, heads, n in cases_for(call, CASES, GPU_CASES):
        generator = torch.Generator().manual_seed(n)
        shape = (tokens, heads, n) if heads else (tokens, n)
        x, grad = (wide_values(shape, dtype, generator) for _ in range(2))
        weight = wide_values((n,), dtype, generator)
        spans, samples = spans_and_samples(tokens)
        y, scales = call("rms_norm", x, weight, EPS, spans, bool(heads))
        given = call("rms_norm_backward", grad, x, weight, scales, spans, bool(heads))
        expected = portable.rms_norm(x, weight, EPS)
        gradients = portable.rms_norm_backward(grad, x, weight, expected[1], samples, heads)
        pairs = zip((y, scales, *given), (*expected, *gradients), strict=True)
        if not all(bits.equal(a, b) for a, b in pairs):
            return f"rms_norm of {list(shape)}"
    return None
