"""The tiles of attention: by use, dtype and GPU, smaller for wide heads.

Every tile gives the same bits: it decides which rows a program computes and never the order in which it adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isobit.ops.gpu.tiles import Table, find

FEWEST = 16  # rows that a tensor core can take
WIDE = 256  # bytes of a head; tiles of wider heads have fewer rows, so that they fit into shared memory


@dataclass(frozen=True)
class HeadTile:
    """What one program computes: `rows` queries of a head; a divisor of a block of keys in a gradient."""

    rows: int
    warps: int
    stages: int

    def fit(self, width: int) -> HeadTile:
        """Return the tile for heads of `width` bytes."""
        if width <= WIDE:
            return self
        return HeadTile(max(self.rows * WIDE // width, FEWEST), self.warps, 1)


# On sm_100 a loop in stages is not waited for as it must be: Triton puts no fence.proxy.async between a copy to shared
# memory and the tensor core, and no barrier where warps reuse each other's tensor memory. The PTX machine refuses such
# code, so a GPU has stages only where it was seen to run without (tests/gpu/test_kernel_races.py).
STAGED = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_120")
# The compiler unrolls a product of fp32 over the whole depth of a head: more than 16 rows need more registers than a
# thread has, and spill thousands of bytes (docs/results/gpu-kernels.md).
HALVES = (torch.bfloat16, torch.float16)
TILES: Table[HeadTile] = {
    ("many queries", None, None): HeadTile(64, 8, 1),
    ("few queries", None, None): HeadTile(16, 8, 2),
    ("gradient", None, None): HeadTile(64, 8, 1),
    ("many queries", torch.float32, None): HeadTile(16, 8, 1),
    ("few queries", torch.float32, None): HeadTile(16, 8, 1),
    ("gradient", torch.float32, None): HeadTile(16, 8, 1),
    **{
        (use, dtype, target): HeadTile(rows, 4, 2)  # a thread of four warps has 512 registers
        for use, rows in (("many queries", 64), ("few queries", 16), ("gradient", 64))
        for dtype in HALVES
        for target in ("gfx942", "gfx950")
    },
    **{
        # No instruction needs 64 rows where there is no wgmma.
        ("many queries", dtype, target): HeadTile(64 if target == "sm_90" else 32, 8, 2)
        for dtype in HALVES
        for target in STAGED
    },
    **{("gradient", dtype, target): HeadTile(64, 8, 2) for dtype in HALVES for target in STAGED},
    **{
        # Every tile spills here: a thread has 256 registers. Of heads of 128, these spill least.
        (use, dtype, "gfx1100"): HeadTile(16, 8, stages)
        for use, stages in (("many queries", 2), ("gradient", 1))
        for dtype in HALVES
    },
}


def tile_of(use: str, dtype: torch.dtype, target: str, width: int) -> HeadTile:
    """Return the tile of a use of attention, for heads of `width` bytes."""
    found = find(TILES, use, dtype, target)
    assert found is not None
    return found.fit(width)
