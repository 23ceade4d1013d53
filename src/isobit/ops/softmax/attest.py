"""Holds the loaded softmax against the portable executor, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.linear.attest import wide_values
from isobit.ops.softmax import portable

# A tail alone; two segments of one leaf; one segment of folded leaves, the last of a single element; tails in both
# segments.
EXTENTS = (7, 512, 1025, 1050)


def difference(dtype: torch.dtype) -> str | None:
    """Where outputs or gradients differ first, or None."""
    for extent in EXTENTS:
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = torch.ops.isobit.softmax(x)
        given = torch.ops.isobit.softmax_backward(grad, y)
        if not (
            bits.equal(y, portable.softmax(x))
            and bits.equal(given, portable.softmax_backward(grad, y))
        ):
            return f"softmax at extent {extent}"
    return None
