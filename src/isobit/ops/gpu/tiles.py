"""The tile of each operator's kernels: by operator, dtype and GPU, never by the number of rows.

A tile decides which elements a program computes, not the order in which it adds: every tile gives the same bits. There
is no autotuning, because it would choose by a shape and by time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


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
Table = dict[tuple[str, torch.dtype | None, str | None], T]
TILES: Table[Tile] = {}


def tile_of(operator: str, dtype: torch.dtype, target: str) -> Tile:
    """Return the tile of an operator's kernels."""
    return find(TILES, operator, dtype, target) or DEFAULT


def find(table: Table[T], operator: str, dtype: torch.dtype, target: str) -> T | None:
    """Return the most specific entry of a table, or None."""
    keys = (
        (operator, dtype, target),
        (operator, None, target),
        (operator, dtype, None),
        (operator, None, None),
    )
    return next((table[key] for key in keys if key in table), None)
