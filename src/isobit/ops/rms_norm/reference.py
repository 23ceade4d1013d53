"""The definition of isobit.rms_norm in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.attesting import draw
from isobit.order.samples import Samples


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, samples: Any = None, heads: bool = False
) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight. samples and heads only order the sum of the weight's gradient."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def example_rms_norm(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x, "weight": draw(48, dtype=x.dtype, seed=3), "samples": Samples.packed([2, 4])}
