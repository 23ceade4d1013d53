"""The tiles of products: by operator, dtype and GPU, smaller for small matrices, and by the number of rows.

Every tile gives the same bits: it decides which elements a program computes and never the order in which it adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from isobit.ops.gpu.tiles import Table, find

FEWEST = 16  # rows, columns or products that a tensor core can take


@dataclass(frozen=True)
class ProductTile:
    """What one program computes: rows × columns of a product, `depth` products of each at a time.

    It keeps the sums of 1 or 2 `pairs` of segments in registers, where they are not spilled.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    pairs: int = 1

    @lru_cache(maxsize=4096)  # noqa: B019 (there are few tiles; a layer asks for the same at every call)
    def fit(self, columns: int, length: int) -> ProductTile:
        """Return a tile that is not wider than a matrix, and not deeper than its segments of `length` products."""
        depth = self.depth
        while depth > FEWEST and depth > length:
            depth //= 2
        return replace(self, columns=min(self.columns, at_least(columns)), depth=depth)


def at_least(size: int) -> int:
    """Return the smallest extent of a tile that covers `size`."""
    return max(FEWEST, 1 << max(size - 1, 0).bit_length())


# "many rows" of 16 bits by target: the tiles of which no register is spilled (docs/results/gpu-kernels.md).
AMPERE = ProductTile(128, 64, 32, 4, 4, 2)  # and what has its matrix instructions
CDNA = ProductTile(128, 128, 64, 4, 2, 2)
MANY_ROWS = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_87", "sm_89"), AMPERE),
    "sm_120": replace(AMPERE, pairs=1),
    **dict.fromkeys(("gfx942", "gfx950"), CDNA),
    "gfx1100": ProductTile(64, 64, 32, 8, 2),
    "sm_90": ProductTile(128, 128, 64, 8, 2, 2),
    "sm_100": ProductTile(128, 128, 32, 8, 4),
}
FEW_ROWS = ProductTile(64, 64, 64, 4, 3)
TILES: Table[ProductTile] = {
    ("many rows", None, None): ProductTile(128, 128, 64, 8, 3),
    ("many rows", torch.float32, None): ProductTile(64, 64, 16, 4, 2),
    ("few rows", None, None): FEW_ROWS,
    ("few rows", torch.float32, None): ProductTile(32, 64, 16, 4, 2),
    ("one tile of rows", None, None): ProductTile(16, 64, 128, 4, 3),
    ("one tile of rows", torch.float32, None): ProductTile(16, 64, 16, 4, 2),
    ("weight gradient", None, None): ProductTile(128, 128, 64, 8, 3),
    ("weight gradient", torch.float32, None): ProductTile(64, 64, 16, 4, 2),
    **{
        ("many rows", dtype, target): tile
        for target, tile in MANY_ROWS.items()
        for dtype in (torch.bfloat16, torch.float16)
    },
    **{
        ("weight gradient", dtype, "gfx1100"): ProductTile(64, 128, 32, 8, 2)
        for dtype in (torch.bfloat16, torch.float16)
    },
    **{
        ("few rows", dtype, target): replace(FEW_ROWS, pairs=2)
        for target in ("sm_90", "sm_100")
        for dtype in (torch.bfloat16, torch.float16)
    },
}


def tile_of(kernel: str, dtype: torch.dtype, target: str) -> ProductTile:
    """Return the tile of a kernel of products."""
    found = find(TILES, kernel, dtype, target)
    assert found is not None
    return found
