"""Compare the native attention with its portable executor, bit for bit, across the edge of a block."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attention import portable
from isobit.ops.portable.hard_inputs import wide_values

KEYS, DEPTH = 66, 16  # a whole block and a part of the next


def difference(dtype: torch.dtype) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(KEYS)
    q, k, v, grad = (wide_values((KEYS, 1, DEPTH), dtype, generator) for _ in range(4))
    spans, blocks, lengths = (
        torch.tensor([[0, KEYS]]),
        torch.tensor([[0, 64]]),
        torch.tensor([KEYS]),
    )
    y, lse = torch.ops.isobit.attention(q, k, v, spans, blocks, lengths, 0.25, True, 0)
    mask = portable.Mask(0.25, True, 0)
    found = torch.ops.isobit.attention_backward(
        grad, q, k, v, y, lse, spans, blocks, lengths, 0.25, True, 0
    )
    known = portable.attention_backward(portable.Saved(grad, q, k, v, y, lse), spans, mask)
    pairs = [
        (y, portable.attention(q, k, v, spans, blocks, lengths, mask)[0]),
        *zip(found, known, strict=True),
    ]
    for name, (left, right) in zip(("outputs", "dq", "dk", "dv"), pairs, strict=True):
        if not bits.equal(left, right):
            return f"attention's {name}"
    return None
