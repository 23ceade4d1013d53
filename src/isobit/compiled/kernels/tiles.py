"""Tiles of a matrix in a one-dimensional grid, columns fastest, and a binary counter of tiles in memory."""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.compiled.kernels.elementary import round_once


@triton.jit
def tile_of_program(
    N: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the rows [BLOCK_M] and the columns [BLOCK_N] of this program's tile of a matrix with N columns."""
    tile, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    rows = (tile // across) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % across) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, columns


@triton.jit
def store_tile(
    y: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
) -> None:
    """Round a tile [BLOCK_M, BLOCK_N] once and store what of it is inside y [M, N]."""
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    place = rows[:, None] * N + columns[None, :]
    tl.store(y + place, round_once(tile, y.dtype.element_ty), mask=inside)


@triton.jit
def counter_of_program(
    scratch: tl.tensor, LEVELS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Return pointers [BLOCK_M, BLOCK_N] to digit 0 in scratch [programs, LEVELS, BLOCK_M, BLOCK_N]."""
    own = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return scratch + tl.program_id(0).to(tl.int64) * (LEVELS * BLOCK_M * BLOCK_N) + own


@triton.jit
def count_tile(
    counter: tl.tensor,
    tile: tl.tensor,
    number: tl.tensor,
    LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Add tile `number` to the counter, and return the digit that it made; the last one is the sum.

    See [Note: binary counter] in isobit/order/tree.py.
    """
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N
    for level in tl.static_range(LEVELS):
        if (number & ((1 << level) - 1)) == (1 << level) - 1:  # all lower digits carried
            if (number >> level) & 1:
                tile = tl.load(counter + level * SIZE) + tile
            else:
                tl.store(counter + level * SIZE, tile)
    return tile
