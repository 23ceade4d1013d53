"""Launch a kernel of a Triton executor: on the chosen backend, else on the GPU of its tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from isobit.errors import UnsupportedError
from isobit.foundation import backends
from isobit.ops.gpu.tiles import target_of_device, tile_of
from isobit.order.plan import LANES, FeaturePlan


def run(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, stages: int = 2, **constants: Any
) -> None:
    """Launch a kernel, without fusion of products and sums; a grid without programs launches nothing.

    Args:
        kernel: A `@triton.jit` function.
        grid: Programs along one to three axes.
        args: Contiguous tensors and numbers, in the order of the kernel's parameters.
        warps: Warps per program.
        stages: Stages of the compiler's software pipeline.
        constants: The kernel's `tl.constexpr` parameters.

    Raises:
        UnsupportedError: If tensors are on the CPU and no backend is chosen, or TRITON_INTERPRET replaced the kernel.
    """
    start(kernel, grid, args, constants, compiler_options(warps, stages))


def compiler_options(warps: int, stages: int = 2) -> dict[str, Any]:
    """Return options of Triton's compiler: products and sums are never fused."""
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def start(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Launch a kernel as `run` does, with constants and options that a caller keeps from call to call."""
    if 0 in grid:
        return
    backend = backends.chosen()
    if backend is not None:
        backend.launch(kernel, grid, args, constants, options)
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    check_gpu(device)
    if not isinstance(kernel, JITFunction):
        raise UnsupportedError(
            expected="kernels that Triton compiles",
            received="TRITON_INTERPRET, which replaces them by Python with another arithmetic",
            remedy="unset TRITON_INTERPRET",
        )
    with torch.cuda.device(device):
        kernel[grid](*args, **constants, **options)


# The memory of results. torch.empty_strided takes two thirds of the time of torch.empty.
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # size and stride


def contiguous(size: tuple[int, ...]) -> Layout:
    """Return a size with the strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return size, tuple(reversed(strides))


def check_gpu(device: torch.device) -> None:
    """Raise unless a device is a GPU, which Triton's runtime needs."""
    if device.type != "cuda":
        raise UnsupportedError(
            expected="tensors on a GPU, or a chosen backend",
            received=f"tensors on {device} for a Triton executor, and no backend",
            remedy="call forward and backward within isobit.certifying.executing(...), or move tensors to a GPU",
        )


known_target = lru_cache(maxsize=64)(target_of_device)  # asked before every launch


def target_of(tensor: Tensor) -> str:
    """Return the GPU that kernels on a tensor are for, such as "sm_90" or "gfx942"."""
    backend = backends.chosen()
    if backend is not None:
        return backend.target
    check_gpu(tensor.device)
    return known_target(tensor.device)


# How the elements of a call are shared out over programs, for functions of one element.


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


# How the rows of a call are shared out over programs.


def row_launch(operator: str, x: Tensor) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return the rows of x [..., N], the grid, and the constants and options of a kernel of rows."""
    n, tile = x.shape[-1], tile_of(operator, x.dtype, target_of(x))
    rows, segments = x.shape[:-1].numel(), FeaturePlan(n).count
    per_program = max(tile.size // (LANES * segments), 1)
    grid = (-(-rows // per_program),)
    return rows, grid, {"N": n, "SEGMENTS": segments, "ROWS": per_program, "warps": tile.warps}
