"""Holds the loaded log-softmax against the portable executor, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.linear.attest import wide_values
from isobit.ops.log_softmax import portable
from isobit.ops.softmax.attest import EXTENTS


def difference(dtype: torch.dtype) -> str | None:
    """Where outputs or gradients differ first, or None."""
    for extent in EXTENTS:
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = torch.ops.isobit.log_softmax(x)
        given = torch.ops.isobit.log_softmax_backward(grad, y)
        if not (
            bits.equal(y, portable.log_softmax(x))
            and bits.equal(given, portable.log_softmax_backward(grad, y))
        ):
            return f"log_softmax at extent {extent}"
    return None
