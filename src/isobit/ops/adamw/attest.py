"""Compare an executor's steps of AdamW, and of scaling, with their definition on the CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from isobit import bits
from isobit.ops.adamw import portable
from isobit.ops.attesting import Call
from isobit.ops.portable.hard_inputs import wide_values

EXTENT = 77
STEPS = (1.0, 3.0, 1000.0)
BETAS = ((0.9, 0.999), (0.0, 0.5))


def call_in_place(name: str, *given: Any) -> Any:
    """Call a native executor, which changes its arguments, with copies."""
    if name == "scaled":
        x = given[0].clone()
        torch.ops.isobit.scale_([x], given[1])
        return x
    p, grad, first, second = (tensor.clone() for tensor in given[:4])
    torch.ops.isobit.adamw_([p], [grad], [first], [second], given[4:])
    return p, first, second


def difference(dtype: torch.dtype, call: Call = call_in_place) -> str | None:
    """Return what differs first, or None."""
    generator = torch.Generator().manual_seed(EXTENT)
    p, grad, first, second = (wide_values((5, EXTENT), dtype, generator) for _ in range(4))
    grad[0, :3], first[0, 1:4] = 0.0, -0.0
    second = second.abs()
    for step, betas in ((step, betas) for step in STEPS for betas in BETAS):
        numbers = portable.numbers_of(1e-3, betas, 1e-8, 0.1 if step > 1 else 0.0, step)
        found = call("adamw", p, grad, first, second, *numbers)
        if not all(map(bits.equal, found, portable.adamw(p, grad, first, second, numbers))):
            return f"AdamW's step {step:.0f}"
    factor = float(torch.tensor(0.3))
    same = bits.equal(call("scaled", grad, factor), portable.scaled(grad, factor))
    return None if same else "a gradient times a number"
