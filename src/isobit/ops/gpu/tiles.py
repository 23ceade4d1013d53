"""The tile of each operator's kernels: by operator, dtype and GPU, never by the number of rows.

A tile decides which elements a program computes, not the order in which it adds: every tile gives the same bits. There
is no autotuning, because it would choose by a shape and by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """What one program computes.

    Attributes:
        size: Elements of the tile of fp32 values that a program works on.
        warps: Warps per program.
    """

    size: int
    warps: int


DEFAULT = Tile(512, 4)
# (operator, dtype or None for all, target or None for all) -> its tile
TILES: dict[tuple[str, torch.dtype | None, str | None], Tile] = {}


def tile_of(operator: str, dtype: torch.dtype, target: str) -> Tile:
    """Return the tile of an operator; the most specific entry counts."""
    keys = (
        (operator, dtype, target),
        (operator, None, target),
        (operator, dtype, None),
        (operator, None, None),
    )
    return next((TILES[key] for key in keys if key in TILES), DEFAULT)
