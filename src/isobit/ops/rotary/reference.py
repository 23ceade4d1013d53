"""The definition of isobit.rotary in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops.attesting import draw


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x · cos + rotate_half(x) · sin, with one angle per token and element of a head."""
    low, high = x.double().chunk(2, -1)
    rotated = torch.cat([-high, low], -1)
    return x.double() * cos.double().unsqueeze(-2) + rotated * sin.double().unsqueeze(-2)


def example_rotary(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]: three heads of 16."""
    angles = draw(6, 16, dtype=torch.float32, seed=4)
    return {"x": x.reshape(1, 6, 3, 16), "cos": angles, "sin": angles}
