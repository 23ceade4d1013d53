"""Compare an executor's LayerNorm with the portable one, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.layer_norm import portable
from isobit.ops.portable.hard_inputs import spans_and_samples, wide_values

# (tokens, n): two leaves of tokens and a tail alone; one long segment of features.
CASES = ((270, 7), (3, 1025))
EPS = 1e-5


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for tokens, n in CASES:
        generator = torch.Generator().manual_seed(n)
        x, grad = (wide_values((tokens, n), dtype, generator) for _ in range(2))
        weight, bias = (wide_values((n,), dtype, generator) for _ in range(2))
        spans, samples = spans_and_samples(tokens)
        found = call("layer_norm", x, weight, bias, EPS, spans)
        given = call("layer_norm_backward", grad, x, weight, *found[1:], spans)
        expected = portable.layer_norm(x, weight, bias, EPS)
        gradients = portable.layer_norm_backward(grad, x, weight, *expected[1:], samples)
        if not all(
            bits.equal(a, b) for a, b in zip((*found, *given), (*expected, *gradients), strict=True)
        ):
            return f"layer_norm of {[tokens, n]}"
    return None
