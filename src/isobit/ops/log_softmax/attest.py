"""Compare an executor's log-softmax with the portable one, bit for bit on hard rows."""

from __future__ import annotations

import torch

from isobit import bits
from isobit.ops.attesting import Call, call_native
from isobit.ops.log_softmax import portable
from isobit.ops.portable.hard_inputs import ROW_LENGTHS, wide_values


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None."""
    for extent in ROW_LENGTHS:
        generator = torch.Generator().manual_seed(extent)
        x, grad = (wide_values((3, extent), dtype, generator) for _ in range(2))
        y = call("log_softmax", x)
        given = call("log_softmax_backward", grad, y)
        if not (
            bits.equal(y, portable.log_softmax(x))
            and bits.equal(given, portable.log_softmax_backward(grad, y))
        ):
            return f"log_softmax at extent {extent}"
    return None
