"""The definition of isobit.linear and isobit.linear_group in fp64, and arguments to try them with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.attesting import draw
from isobit.order.samples import Samples


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, samples: Any = None) -> Tensor:
    """Return x @ weight.T + bias. The samples matter only for the order in which gradients are summed."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def linear_group(x: Tensor, weights: list[Tensor], *, samples: Any = None) -> tuple[Tensor, ...]:
    """Return x @ weight.T for each weight."""
    return tuple(linear(x, weight) for weight in weights)


def example_linear(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    weight, bias = draw(9, 48, dtype=x.dtype, seed=1), draw(9, dtype=x.dtype, seed=2)
    return {"x": x, "weight": weight, "bias": bias, "samples": Samples.packed([2, 4])}


def example_linear_group(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    weights = [draw(9, 48, dtype=x.dtype, seed=seed) for seed in (1, 7)]
    return {"x": x, "weights": weights, "samples": Samples.packed([2, 4])}
