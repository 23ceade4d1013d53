"""Compare an executor's softmax with the portable one, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.portable.hard_inputs import ROW_LENGTHS, wide_values
from isobit.ops.softmax import portable


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for extent in ROW_LENGTHS:
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = call("softmax", x)
        given = call("softmax_backward", grad, y)
        if not (
            bits.equal(y, portable.softmax(x))
            and bits.equal(given, portable.softmax_backward(grad, y))
        ):
            return f"softmax at extent {extent}"
    return None
