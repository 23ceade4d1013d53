"""The Triton executor of the linear layer: forward, and the gradients of input, weight and bias."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.device_tables import table_of
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run, target_of
from isobit.ops.gpu.ordered_rows import BLOCK as COLUMNS
from isobit.ops.gpu.ordered_rows import WARPS, Leaves, sum_leaves
from isobit.ops.linear.tiles import ProductTile, at_least, tile_of
from isobit.ops.linear.triton_products import (
    linear_counter,
    linear_segments,
    linear_tile,
    merge_segments,
    sum_leaf_rows,
    weight_grad,
)
from isobit.ops.portable.samples import whole_samples
from isobit.ops.share import gradient_dtype
from isobit.order.plan import LEAF, FeaturePlan
from isobit.order.samples import Samples, segment_size

# Fewer rows have smaller tiles, and if these are fewer than ENOUGH, each segment has programs of its own. All forms
# compute one expression.
MANY_ROWS, ENOUGH = 128, 256
IN_REGISTERS = 2  # segments whose partial sums a program keeps in registers
SCRATCH = 1 << 26  # elements of the partial sums of one launch
ADDRESSABLE = 1 << 31
BLOCK = 64


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    out: Tensor | None = None,
    enough: int = ENOUGH,
) -> Tensor:
    """Return x [..., K] · weightᵀ + bias, rounded to dtype: weight is [N, K], or [K, N] if `transposed`.

    `out` is contiguous memory for it, of its shape and dtype. Few rows with fewer tiles than `enough` have a program
    per segment.
    """
    extent = x.shape[-1]
    columns = weight.shape[1 if transposed else 0]
    check_addressable(weight)
    y = torch.empty(*x.shape[:-1], columns, dtype=dtype, device=x.device) if out is None else out
    rows, segments = x.shape[:-1].numel(), FeaturePlan(extent).count
    factor = weight.contiguous()
    given = x.contiguous(), factor, factor if bias is None else bias.contiguous()
    constants = {"N": columns, "K": extent, "SEGMENTS": segments, "TRANSPOSED": transposed}
    tile = fitted(x, rows, constants)
    few = rows < MANY_ROWS and count_tiles(rows, columns, tile) < enough
    form = multiply_segments if few and segments > 1 else multiply_tiles
    form(given, y, rows, tile, constants, bias is not None)
    return y


def multiply_tiles(
    given: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    rows: int,
    tile: ProductTile,
    constants: dict[str, int],
    has_bias: bool,
) -> None:
    """Compute y by one program per tile, which adds all segments."""
    x, weight, bias = given
    tiles, segments = count_tiles(rows, constants["N"], tile), constants["SEGMENTS"]
    how = {**constants, **blocks(tile), "HAS_BIAS": has_bias}
    if segments <= IN_REGISTERS:
        run(linear_tile, (tiles,), x, weight, bias, y, rows, 0, **how)
        return
    levels = segments.bit_length() - tile.pairs.bit_length() - 1
    at_once = max(SCRATCH // (max(levels, 1) * tile.rows * tile.columns), 1)
    scratch = partial_sums(x, min(at_once, tiles), max(levels, 1), tile.rows, tile.columns)
    for first in range(0, tiles, at_once):
        grid = (min(at_once, tiles - first),)
        run(
            linear_counter,
            grid,
            x,
            weight,
            bias,
            y,
            scratch,
            rows,
            first,
            PAIRS=tile.pairs,
            LEVELS=levels,
            **how,
        )


def multiply_segments(
    given: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    rows: int,
    tile: ProductTile,
    constants: dict[str, int],
    has_bias: bool,
) -> None:
    """Compute y by one program per tile and segment, and merge the segments."""
    x, weight, bias = given
    columns, segments = constants["N"], constants["SEGMENTS"]
    partial = partial_sums(x, segments, rows, columns)
    grid = (count_tiles(rows, columns, tile), segments)
    run(linear_segments, grid, x, weight, partial, rows, **constants, **blocks(tile))
    run(
        merge_segments,
        (-(-rows * columns // BLOCK),),
        partial,
        bias,
        y,
        rows,
        warps=2,
        N=columns,
        SEGMENTS=segments,
        HAS_BIAS=has_bias,
        BLOCK=BLOCK,
    )


def sum_weight_grad(
    grad: Tensor, x: Tensor, samples: Samples, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return dW [N, K], summed over the samples of grad [..., N] and x [..., K], rounded to dtype.

    `out` is contiguous memory for it, of its shape and dtype.
    """
    outputs, inputs = grad.shape[-1], x.shape[-1]
    dw = torch.empty((outputs, inputs), dtype=dtype, device=x.device) if out is None else out
    if not samples.spans:
        return dw.zero_()
    check_addressable(dw)
    tile = tile_of("weight gradient", x.dtype, target_of(x)).fit(inputs, LEAF)
    tile = replace(tile, rows=min(tile.rows, at_least(outputs)))
    size = segment_size(samples.total)
    segments = len(samples.spans) // size
    levels, tiles = segments.bit_length() - 1, count_tiles(outputs, inputs, tile)
    at_once = max(SCRATCH // (max(levels, 1) * tile.rows * tile.columns), 1)
    scratch = partial_sums(x, min(at_once, tiles), max(levels, 1), tile.rows, tile.columns)
    spans = table_of(samples.spans, (-1, 2), x.device)
    given = grad.contiguous(), x.contiguous(), spans, dw, scratch
    for first in range(0, tiles, at_once):
        run(
            weight_grad,
            (min(at_once, tiles - first),),
            *given,
            first,
            segments,
            size,
            levels,
            N=outputs,
            K=inputs,
            BLOCK_N=tile.rows,
            BLOCK_K=tile.columns,
            BLOCK_T=tile.depth,
            warps=tile.warps,
            stages=tile.stages,
        )
    return dw


def sum_bias_grad(grad: Tensor, samples: Samples) -> Tensor:
    """Return db [N], summed over the samples of grad [..., N]."""
    columns, leaves = grad.shape[-1], Leaves.of(samples, grad.device)
    sums = partial_sums(grad, leaves.count, columns)
    grid = (leaves.count, -(-columns // COLUMNS))
    given = grad.contiguous(), leaves.table, sums
    run(sum_leaf_rows, grid, *given, N=columns, BLOCK=COLUMNS, warps=WARPS)
    return sum_leaves(sums, leaves, gradient_dtype(grad.dtype, len(samples.spans), samples.total))


def fitted(x: Tensor, rows: int, constants: dict[str, int]) -> ProductTile:
    """Return the tile of a call."""
    kind = "many rows" if rows >= MANY_ROWS else "few rows" if rows > 16 else "one tile of rows"
    length = constants["K"] // constants["SEGMENTS"]
    return tile_of(kind, x.dtype, target_of(x)).fit(constants["N"], length)


def blocks(tile: ProductTile) -> dict[str, int]:
    """Return a tile as constants and options of a kernel."""
    sizes = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    return {**sizes, "warps": tile.warps, "stages": tile.stages}


def count_tiles(rows: int, columns: int, tile: ProductTile) -> int:
    """Return the number of tiles of a matrix."""
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def partial_sums(like: Tensor, *shape: int) -> Tensor:
    """Return memory for fp32 sums on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def check_addressable(weight: Tensor) -> None:
    """Raise unless kernels can address the elements of a weight with 32 bits."""
    if weight.numel() >= ADDRESSABLE:
        raise UnsupportedError(
            expected="a weight with fewer than 2^31 elements on a GPU",
            received=f"{list(weight.shape)}",
            remedy="cut the weight over ranks",
        )


@triton_operator("linear")
def triton_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    spans: Tensor | None,
    packed: Tensor | None = None,
    of: int = 0,
) -> Tensor:
    return multiply(x, weight, bias, x.dtype)


@triton_operator("linear_fp32")
def triton_linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, weight, None, torch.float32)


@triton_operator("linear_input_grad")
def triton_input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return multiply(grad, weight, None, grad.dtype, transposed=True)


@triton_operator("linear_weight_grad")
def triton_weight_grad(grad: Tensor, x: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    samples = whole_samples(grad, spans, of)
    dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
    return sum_weight_grad(grad, x, samples, dtype)


@triton_operator("linear_bias_grad")
def triton_bias_grad(grad: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    return sum_bias_grad(grad, whole_samples(grad, spans, of))
