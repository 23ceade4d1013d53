"""The definition of isobit.layer_norm in fp64, and arguments to try it with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.attesting import draw


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, *, samples: Any = None
) -> Tensor:
    """Return (x − mean) / sqrt(variance + eps) · weight + bias."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def example_layer_norm(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    norm = draw(48, dtype=x.dtype, seed=3)
    return {"x": x, "weight": norm, "bias": norm}
