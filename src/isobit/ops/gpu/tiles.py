"""The tile of each operator's kernels: by operator, dtype and GPU, never by the number of rows.

A tile decides which elements a program computes, not the order in which it adds: every tile gives the same bits. There
is no autotuning, because it would choose by a shape and by time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from isobit.order.engines import ENGINE_OF_TARGET

# Which GPU a device is, and the arithmetic of its matrix products; without Triton.


def target_of_device(device: torch.device) -> str:
    """Return the name that Triton compiles for, such as "sm_90" or "gfx942"."""
    if torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def engine_on_gpu(dtype: torch.dtype, device: torch.device) -> str:
    """Return the engine of products of a dtype on a GPU; one that is not known has the GPU's name."""
    if dtype not in (torch.bfloat16, torch.float16):
        return "chain"
    target = target_of_device(device)
    return ENGINE_OF_TARGET.get(target, f"that of {target}")


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
    return (
        table.get((operator, dtype, target))
        or table.get((operator, None, target))
        or table.get((operator, dtype, None))
        or table.get((operator, None, None))
    )
