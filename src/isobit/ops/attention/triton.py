"""The Triton executor of attention.

One order and two forms of the forward: `attention` for many queries, `attention_chunks` and `merge_chunks` (split-KV)
for few queries over more than one chunk. Keys are read through the table of blocks, whether they are those of a call,
of packed samples, or the pages of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.errors import UnsupportedError
from isobit.ops.attention.tiles import HeadTile, tile_of
from isobit.ops.attention.triton_backward import (
    differentiate_keys,
    differentiate_queries,
    dot_heads,
)
from isobit.ops.attention.triton_forward import attention, attention_chunks, merge_chunks
from isobit.ops.device_tables import derived_of
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import Layout, compiler_options, contiguous, run, start, target_of
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK

# Sizes of tiles and the choice of a form are not part of the order: every one gives the same bits.
FEW_ROWS = 16  # up to how many rows of a sample and a key head are few
DOT_ROWS = 32
# Bytes of a head, padded, whose gradient fits into the shared memory of a GPU; others take every head.
WIDEST_GRADIENT = {"sm_80": 512, "sm_86": 256, "sm_89": 256, "sm_120": 256}
CHUNK = ATTENTION_CHUNK


def extent_of(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the most queries of a sample, and the rows of all if they follow each other from row 0 on, else -1."""
    longest = end = 0
    for first, rows in spans:
        longest = max(longest, rows)
        end = end + rows if first == end else -1
    return longest, end


def head_constants(size: tuple[int, ...], key_heads: int, is_capped: bool) -> dict[str, Any]:
    """Return the constants that all kernels of rows have, for q [..., H, D] of this size and k [..., H_kv, D]."""
    depth = size[-1]
    return {
        "KEY_HEADS": key_heads,
        "GROUP": size[-2] // key_heads,
        "DEPTH": depth,
        "PADDED": 1 << (depth - 1).bit_length(),
        "CAPPED": is_capped,
    }


def limits_of(causal: bool, window: int, chunk_size: int, table: int) -> tuple[int, int, int]:
    """Return before, after and size of a mask, as triton_forward.py has them, for a table of so many blocks.

    No limit is larger than the table, so that sums of positions fit in 32 bits.
    """
    keys = table * ATTENTION_BLOCK
    before = min(window - 1, keys) if window else keys
    return before, 0 if causal else before, min(chunk_size or keys, keys)


def check_gradient(q: Tensor) -> None:
    """Raise if the tiles of the gradient do not fit into the GPU's shared memory."""
    target, width = target_of(q), padded_width(q)
    if width > WIDEST_GRADIENT.get(target, width):
        raise UnsupportedError(
            expected=f"heads of at most {WIDEST_GRADIENT[target]} bytes in a gradient on {target}, by its memory",
            received=f"heads of {q.shape[-1]} of {q.dtype}, which are {width} bytes when padded",
            remedy="use a 16-bit dtype, another GPU, or tensors on the CPU",
        )


def padded_width(x: Tensor) -> int:
    """Return the bytes of a padded head of x [..., D]."""
    return (1 << (x.shape[-1] - 1).bit_length()) * x.dtype.itemsize


def head_tile(use: str, x: Tensor) -> HeadTile:
    """Return the tile of a use, for x [..., D]."""
    return tile_of(use, x.dtype, target_of(x), padded_width(x))


@triton_operator("attention")
def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float = 0.0,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    size, key_heads, device = q.shape, k.shape[-2], q.device
    longest, end = derived_of(spans, extent_of)
    few = longest * (size[-2] // key_heads) <= FEW_ROWS
    plan = plan_forward(
        size,
        key_heads,
        spans.shape[0],
        longest,
        blocks.shape[1],
        (causal, window, chunk_size, softcap > 0),
        head_tile("few queries" if few else "many queries", q),
        few,
        CHUNK,
    )
    y = torch.empty_strided(*plan.result, dtype=q.dtype, device=device)
    lse = torch.empty_strided(*plan.lse, dtype=torch.float32, device=device)
    if end != plan.rows:  # kernels write the rows of samples, and there are others
        y.zero_()
        lse.fill_(torch.inf)
    if not longest or not q.numel():
        return y, lse
    given = q.contiguous(), k.contiguous(), v.contiguous()
    spans, lengths = spans.contiguous(), lengths.contiguous()
    where = (spans, blocks.contiguous(), lengths, *plan.where, scale, softcap)
    if not plan.states:
        start(attention, plan.grid, (*given, y, lse, *where), plan.constants, plan.options)
        return y, lse
    states = [torch.empty_strided(*one, dtype=torch.float32, device=device) for one in plan.states]
    start(attention_chunks, plan.grid, (*given, *states, *where), plan.constants, plan.options)
    merged = (*states, y, lse, spans, lengths, *plan.merged)
    start(merge_chunks, plan.grid[:2], merged, plan.merging, plan.options)
    return y, lse


class ForwardPlan(NamedTuple):
    """The launches of a forward, which depend on its sizes.

    Attributes:
        rows: The rows of q.
        result, lse: Sizes and strides of the results.
        states: Sizes and strides of the states of chunks; none if `attention` serves the call.
        grid: Of `attention` or `attention_chunks`.
        where: The numbers that these take after the tables, but for the scale and the soft cap.
        merged: The numbers that `merge_chunks` takes after the tables.
        constants: Of `attention` or `attention_chunks`.
        merging: Of `merge_chunks`.
        options: Of the compiler.
    """

    rows: int
    result: Layout
    lse: Layout
    states: tuple[Layout, ...]
    grid: tuple[int, ...]
    where: tuple[int, ...]
    merged: tuple[int, ...]
    constants: dict[str, Any]
    merging: dict[str, Any]
    options: dict[str, Any]


@lru_cache(maxsize=4096)
def plan_forward(
    size: tuple[int, ...],
    key_heads: int,
    samples: int,
    longest: int,
    table: int,
    mask: tuple[bool, int, int, bool],
    tile: HeadTile,
    few: bool,
    chunk: int,
) -> ForwardPlan:
    """Choose the form of a forward of q of this size: it suits the number of queries.

    The arguments are the key of a cache: everything that the choice reads.
    """
    causal, window, chunk_size, capped = mask
    merging = {**head_constants(size, key_heads, capped), "ROWS": tile.rows, "CHUNK": chunk}
    # Whether a query hides a key of a block that it sees: one before a window or chunk, or after itself.
    constants = {**merging, "GUARD": bool(window or chunk_size or (causal and longest > 1))}
    del merging["CAPPED"]
    limits = limits_of(causal, window, chunk_size, table)
    tiles = -(-longest * merging["GROUP"] // tile.rows)
    grid: tuple[int, ...] = (tiles * samples, key_heads)
    chunks = -(-table * ATTENTION_BLOCK // chunk)
    heads = math.prod(size[:-1])
    where: tuple[int, ...] = (tiles, table, *limits)
    states: tuple[Layout, ...] = ()
    if few and chunks > 1:
        grid, where = (*grid, chunks), (*where, heads)
        states = tuple(
            contiguous(one) for one in ((chunks, heads), (chunks, heads), (chunks, heads, size[-1]))
        )
    return ForwardPlan(
        math.prod(size[:-2]),
        contiguous(size),
        contiguous(size[:-1]),
        states,
        grid,
        where,
        (tiles, *limits, heads),
        constants,
        merging,
        compiler_options(tile.warps, tile.stages),
    )


@triton_operator("attention_backward")
def triton_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float = 0.0,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    longest = derived_of(spans, extent_of)[0] if q.numel() else 0
    if not longest:
        return dq, dk, dv
    check_gradient(q)
    grad, lse, heads = grad.contiguous(), lse.contiguous(), lse.numel()
    dots = torch.empty_like(lse)
    how: dict[str, Any] = {"DEPTH": q.shape[-1], "ROWS": DOT_ROWS, "warps": 4}
    run(dot_heads, (-(-heads // DOT_ROWS),), grad, out.contiguous(), dots, heads, **how)
    inputs = (grad, q.contiguous(), k.contiguous(), v.contiguous(), lse, dots)
    tile = head_tile("gradient", q)
    how = {
        **head_constants(q.shape, k.shape[-2], softcap > 0),
        "ROWS": tile.rows,
        "warps": tile.warps,
        "stages": tile.stages,
    }
    tiles = -(-longest // tile.rows)
    tables = spans.contiguous(), blocks.contiguous(), lengths.contiguous()
    limits = limits_of(causal, window, chunk_size, blocks.shape[1])
    where = (*tables, tiles, blocks.shape[1], *limits, scale, softcap)
    programs = tiles * len(spans)
    run(differentiate_queries, (programs, q.shape[-2]), *inputs, dq, *where, **how)
    run(differentiate_keys, (programs, k.shape[-2]), *inputs, dk, dv, *where, **how)
    return dq, dk, dv
