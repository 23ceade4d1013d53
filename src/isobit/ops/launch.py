"""Calls an operator: picks its executor and records the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobit.ops import dispatch


def launch(name: str, sizes: tuple[int, ...], *given: Any, dtype: torch.dtype | None = None) -> Any:
    """Call the operator on `given`; the first tensor's dtype picks the executor, unless `dtype` does.

    Recordings of launches receive `sizes`.
    """
    chosen = given[0].dtype if dtype is None else dtype
    native = dispatch.is_native(chosen)
    if dispatch.is_recording():
        dispatch.record(name, native, chosen, sizes)
    return getattr(torch.ops.isobit, name if native else f"portable_{name}")(*given)


def rows_and_columns(x: Tensor) -> tuple[int, int]:
    """Return the sizes by which launches of functions of rows and of elements are recorded."""
    return (x.shape[:-1].numel(), x.shape[-1]) if x.dim() else (1, 1)
