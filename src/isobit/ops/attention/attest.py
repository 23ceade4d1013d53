"""Holds the loaded attention against the portable executor, bit for bit, over a block edge."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attention import portable
from isobit.ops.linear.attest import wide_values

KEYS, DEPTH = 66, 16  # a whole block and a part of one


def difference(dtype: torch.dtype) -> str | None:
    """Where outputs or gradients differ first, or None; other dtypes share the code."""
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
    known = portable.attention_backward(portable.Given(grad, q, k, v, y, lse), spans, mask)
    pairs = [
        (y, portable.attention(q, k, v, spans, blocks, lengths, mask)[0]),
        *zip(found, known, strict=True),
    ]
    for name, (left, right) in zip(("outputs", "dq", "dk", "dv"), pairs, strict=True):
        if not bits.equal(left, right):
            return f"attention's {name}"
    return None
