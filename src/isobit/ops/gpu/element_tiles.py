"""How the elements of a call are shared out over programs, for functions of one element."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.tiles import tile_of


def run_elements(
    operator: str, kernel: Any, given: tuple[Tensor, ...], out: tuple[Tensor, ...], **constants: Any
) -> None:
    """Launch a kernel of elements; inputs are made contiguous, outputs are contiguous, all have one shape."""
    size, tile = out[0].numel(), tile_of(operator, out[0].dtype, target_of(out[0]))
    run(
        kernel,
        (-(-size // tile.size),),
        *(tensor.contiguous() for tensor in given),
        *out,
        size,
        warps=tile.warps,
        BLOCK=tile.size,
        **constants,
    )
