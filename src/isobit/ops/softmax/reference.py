"""The definition of isobit.softmax in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Return exp(x - max) / Σ exp(x - max)."""
    terms = (x.double() - x.double().amax(dim, keepdim=True)).exp()
    return terms / terms.sum(dim, keepdim=True)


def example_softmax(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x}
