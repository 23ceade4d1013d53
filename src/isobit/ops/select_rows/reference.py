"""The definition of isobit.select_rows, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen rows of x."""
    return x.double().reshape(-1, x.shape[-1])[rows.long()]


def example_select_rows(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, made from x [6, 48]."""
    return {"x": x, "rows": torch.tensor([4, 0, 5], device=torch.device("cpu"))}
