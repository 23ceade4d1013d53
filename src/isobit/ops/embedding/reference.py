"""The definition of isobit.embedding, and arguments to try it with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.order.samples import Samples


def embedding(
    ids: Tensor, weight: Tensor, *, samples: Any = None, padding_idx: int | None = None
) -> Tensor:
    """Return the rows of the table; the padding's row has no gradient."""
    rows = weight.double()[ids.long()]
    if padding_idx is None:
        return rows
    return torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)


def example_embedding(x: Tensor) -> dict[str, Any]:
    """Return the arguments of one call, with x [6, 48] as the table."""
    ids = torch.tensor([0, 3, 1, 1, 5, 2], device=torch.device("cpu"))
    return {"ids": ids, "weight": x, "samples": Samples.packed([2, 4])}
