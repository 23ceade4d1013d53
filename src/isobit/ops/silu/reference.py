"""The definition of isobit.silu in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + e^-x)."""
    return x.double() / (1 + (-x.double()).exp())


def example_silu(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x}
