"""The definition of isobit.log_softmax in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return (x − max) − log Σ exp(x − max)."""
    shifted = x.double() - x.double().amax(dim, keepdim=True)
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def example_log_softmax(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x}
