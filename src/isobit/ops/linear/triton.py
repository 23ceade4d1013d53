"""The Triton executor of the linear layer: forward, and the gradients of input, weight and bias."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.device_tables import table_of
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import Layout, compiler_options, contiguous, run, start, target_of
from isobit.ops.gpu.ordered_rows import BLOCK as COLUMNS
from isobit.ops.gpu.ordered_rows import WARPS, Leaves, sum_leaves
from isobit.ops.linear.tiles import ProductTile, at_least, tile_of
from isobit.ops.linear.triton_products import (
    linear_counter,
    linear_segments,
    linear_tile,
    merge_parts,
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
MERGED = 512  # elements of a program of merge_parts: each in one thread, which reads what it wrote
MERGING = compiler_options(2)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    out: Tensor | None = None,
    enough: int | None = None,
) -> Tensor:
    """Return x [..., K] · weightᵀ + bias, rounded to dtype: weight is [N, K], or [K, N] if `transposed`.

    `out` is contiguous memory for it, of its shape and dtype. Few rows with fewer tiles than `enough`, by default
    ENOUGH, have a program per segment.
    """
    size, device = x.shape, x.device
    rows = size[:-1].numel()
    kind = "many rows" if rows >= MANY_ROWS else "few rows" if rows > 16 else "one tile of rows"
    segments, tile = feature_plan(size[-1]).count, tile_of(kind, x.dtype, target_of(x))
    how = (MANY_ROWS, ENOUGH if enough is None else enough, IN_REGISTERS, SCRATCH)
    plan = plan_product(size, weight.shape, segments, tile, transposed, bias is not None, how)
    y = torch.empty_strided(*plan.result, dtype=dtype, device=device) if out is None else out
    x, weight = x.contiguous(), weight.contiguous()
    bias = weight if bias is None else bias.contiguous()
    constants, options = plan.constants, plan.options
    if plan.sums is None:
        start(linear_tile, plan.grids[0], (x, weight, bias, y, rows, 0), constants, options)
        return y
    sums = torch.empty_strided(*plan.sums, dtype=torch.float32, device=device)
    if plan.merging:
        start(linear_segments, plan.grids[0], (x, weight, sums, rows), constants, options)
        start(merge_segments, plan.grids[1], (sums, bias, y, rows), plan.merging, MERGING)
        return y
    first = 0
    for grid in plan.grids:
        given = (x, weight, bias, y, sums, rows, first)
        start(linear_counter, grid, given, constants, options)
        first += grid[0]
    return y


feature_plan = lru_cache(maxsize=1024)(FeaturePlan)


class ProductPlan(NamedTuple):
    """The launches of a product, which depend on its sizes: a layer's are the same at every call.

    Attributes:
        result: Of the product, contiguous.
        sums: Of the partial sums in fp32; None if `linear_tile` keeps them in registers.
        grids: Of `linear_tile`; of `linear_segments` and `merge_segments`; or of each launch of `linear_counter`.
        constants: Of all but `merge_segments`.
        merging: Of `merge_segments`; empty if no segment has programs of its own.
        options: Of the compiler, for all but `merge_segments`.
    """

    result: Layout
    sums: Layout | None
    grids: tuple[tuple[int, ...], ...]
    constants: dict[str, int]
    merging: dict[str, int]
    options: dict[str, Any]


@lru_cache(maxsize=4096)
def plan_product(
    size: tuple[int, ...],
    weight: tuple[int, int],
    segments: int,
    tile: ProductTile,
    transposed: bool,
    has_bias: bool,
    how: tuple[int, int, int, int],
) -> ProductPlan:
    """Choose the form of a product of x of this size: it is a key of a cache with everything that the choice reads."""
    many_rows, enough, in_registers, most = how
    check_addressable(weight)
    rows, extent, columns = math.prod(size[:-1]), size[-1], weight[1 if transposed else 0]
    tile = tile.fit(columns, extent // segments)
    tiles = count_tiles(rows, columns, tile)
    result = contiguous((*size[:-1], columns))
    constants = {"N": columns, "K": extent, "SEGMENTS": segments, "TRANSPOSED": transposed}
    constants |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    options = compiler_options(tile.warps, tile.stages)
    if rows < many_rows and tiles < enough and segments > 1:  # a program per tile and segment
        merging = {"N": columns, "SEGMENTS": segments, "HAS_BIAS": has_bias, "BLOCK": BLOCK}
        sums, each = contiguous((segments, rows, columns)), (tiles, segments)
        grids: tuple[tuple[int, ...], ...] = (each, (-(-rows * columns // BLOCK),))
        return ProductPlan(result, sums, grids, constants, merging, options)
    constants["HAS_BIAS"] = has_bias
    if segments <= in_registers:
        return ProductPlan(result, None, ((tiles,),), constants, {}, options)
    levels = segments.bit_length() - tile.pairs.bit_length() - 1
    constants |= {"PAIRS": tile.pairs, "LEVELS": levels}
    slot = (max(levels, 1), tile.rows, tile.columns)
    at_once = max(most // math.prod(slot), 1)
    grids = tuple((min(at_once, tiles - first),) for first in range(0, tiles, at_once))
    return ProductPlan(
        result, contiguous((min(at_once, tiles), *slot)), grids, constants, {}, options
    )


def sum_weight_grad(
    grad: Tensor,
    x: Tensor,
    samples: Samples,
    dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    spans: Tensor | None = None,
    enough: int | None = None,
) -> Tensor:
    """Return dW [N, K], summed over the samples of grad [..., N] and x [..., K], rounded to dtype.

    `out` is contiguous memory for it, of its shape and dtype, and `spans` the table of the samples' spans. A weight of
    at most half of `enough` tiles, by default ENOUGH, has programs for parts of the segments, up to `enough` in all.
    """
    outputs, inputs = grad.shape[-1], x.shape[-1]
    dw = torch.empty((outputs, inputs), dtype=dtype, device=x.device) if out is None else out
    if not samples.spans:
        return dw.zero_()
    check_addressable(dw.shape)
    tile = tile_of("weight gradient", x.dtype, target_of(x)).fit(inputs, LEAF)
    tile = replace(tile, rows=min(tile.rows, at_least(outputs)))
    size = segment_size(samples.total)
    segments = len(samples.spans) // size
    tiles, most = count_tiles(outputs, inputs, tile), ENOUGH if enough is None else enough
    # The size of the weight decides, so that another number of samples needs no other kernel.
    splits = 0 < 2 * tiles <= most
    parts = min(segments, 1 << (most // tiles).bit_length() - 1) if splits else 1
    segments //= parts
    levels = segments.bit_length() - 1
    sums = partial_sums(x, parts, outputs, inputs) if splits else dw
    at_once = max(SCRATCH // (max(levels, 1) * tile.rows * tile.columns), 1)
    at_once = tiles if splits else at_once
    scratch = partial_sums(x, parts * min(at_once, tiles), max(levels, 1), tile.rows, tile.columns)
    if spans is None or spans.device != x.device:
        spans = table_of(samples.spans, (-1, 2), x.device)
    given = grad.contiguous(), x.contiguous(), spans.contiguous(), sums, scratch
    for first in range(0, tiles, at_once):
        run(
            weight_grad,
            (min(at_once, tiles - first), parts),
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
            SPLIT=splits,
            warps=tile.warps,
            stages=tile.stages,
        )
    if splits:
        grid = (-(-dw.numel() // MERGED),)
        run(merge_parts, grid, sums, dw, parts, SIZE=dw.numel(), BLOCK=MERGED, warps=WARPS)
    return dw


def sum_bias_grad(grad: Tensor, samples: Samples) -> Tensor:
    """Return db [N], summed over the samples of grad [..., N]."""
    columns, leaves = grad.shape[-1], Leaves.of(samples, grad.device)
    sums = partial_sums(grad, leaves.count, columns)
    grid = (leaves.count, -(-columns // COLUMNS))
    given = grad.contiguous(), leaves.table, sums
    run(sum_leaf_rows, grid, *given, N=columns, BLOCK=COLUMNS, warps=WARPS)
    return sum_leaves(sums, leaves, gradient_dtype(grad.dtype, len(samples.spans), samples.total))


def count_tiles(rows: int, columns: int, tile: ProductTile) -> int:
    """Return the number of tiles of a matrix."""
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def partial_sums(like: Tensor, *shape: int) -> Tensor:
    """Return memory for fp32 sums on the device of a tensor."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def check_addressable(weight: tuple[int, ...]) -> None:
    """Raise unless kernels can address the elements of a weight of this size with 32 bits."""
    if math.prod(weight) >= ADDRESSABLE:
        raise UnsupportedError(
            expected="a weight with fewer than 2^31 elements on a GPU",
            received=f"{list(weight)}",
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
    return sum_weight_grad(grad, x, samples, dtype, spans=spans)


@triton_operator("linear_bias_grad")
def triton_bias_grad(grad: Tensor, spans: Tensor | None, of: int = 0) -> Tensor:
    return sum_bias_grad(grad, whole_samples(grad, spans, of))
