"""The definition of isobit.gelu in fp64, and arguments to try it with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x · Φ(x), where Φ is the standard normal distribution function; "tanh" approximates Φ."""
    wide = x.double()
    if approximate == "tanh":
        inner = (wide + 0.044715 * wide * wide * wide) * math.sqrt(2 / math.pi)
        return (1 + inner.tanh()) * wide / 2
    return wide * (1 + torch.erf(wide / 2**0.5)) / 2


def example_gelu(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x}
