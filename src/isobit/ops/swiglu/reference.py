"""The definition of isobit.swiglu in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.attesting import draw


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up."""
    return gate.double() / (1 + (-gate.double()).exp()) * up.double()


def example_swiglu(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"gate": x, "up": draw(6, 48, dtype=x.dtype, seed=0)}
