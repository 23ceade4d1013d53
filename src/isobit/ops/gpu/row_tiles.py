"""How the rows of a call are shared out over programs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.gpu.launching import target_of
from isobit.ops.gpu.tiles import tile_of
from isobit.order.plan import LANES, FeaturePlan


def row_launch(operator: str, x: Tensor) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return the rows of x [..., N], the grid, and the constants and options of a kernel of rows."""
    n, tile = x.shape[-1], tile_of(operator, x.dtype, target_of(x))
    rows, segments = x.shape[:-1].numel(), FeaturePlan(n).count
    per_program = max(tile.size // (LANES * segments), 1)
    grid = (-(-rows // per_program),)
    return rows, grid, {"N": n, "SEGMENTS": segments, "ROWS": per_program, "warps": tile.warps}
