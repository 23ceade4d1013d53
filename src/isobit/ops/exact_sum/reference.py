"""The definition of isobit.exact_sum with rational numbers, and arguments to try it with."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor


def exact_sum(x: Tensor) -> Tensor:
    """Return the exact sum of finite values, rounded once to fp64."""
    total = sum(map(Fraction, x.double().flatten().tolist()), Fraction(0))
    return torch.tensor(float(total), dtype=torch.float64)


def example_exact_sum(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x}
