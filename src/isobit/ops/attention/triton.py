"""The Triton executor of attention.

One order and two forms of the forward: `attention` for many queries, `attention_chunks` and `merge_chunks` (split-KV)
for few queries over more than one chunk. Keys are read through the table of blocks, whether they are those of a call,
of packed samples, or the pages of a cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from isobit.ops.attention.triton_backward import (
    differentiate_keys,
    differentiate_queries,
    dot_heads,
)
from isobit.ops.attention.triton_forward import attention, attention_chunks, merge_chunks
from isobit.ops.gpu.executors import triton_operator
from isobit.ops.gpu.launching import run
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK

# Sizes of tiles and the choice of a form are not part of the order: every one gives the same bits.
FEW_ROWS = 16  # the tile of few queries, and up to how many rows of a sample and a key head are few
MANY_ROWS = 64
WIDE_DEPTH = 128  # from here on, a tile has twice the warps
BACKWARD_ROWS = 64  # a divisor of a block
DOT_ROWS = 32
CHUNK = ATTENTION_CHUNK


def common_constants(q: Tensor, k: Tensor, causal: bool, window: int) -> dict[str, Any]:
    """Return the constants that all kernels have."""
    depth, key_heads = q.shape[-1], k.shape[-2]
    return {
        "KEY_HEADS": key_heads,
        "GROUP": q.shape[-2] // key_heads,
        "DEPTH": depth,
        "PADDED": triton.next_power_of_2(depth),
        "CAUSAL": causal,
        "WINDOWED": window > 0,
        "warps": 8 if depth >= WIDE_DEPTH else 4,
    }


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
) -> tuple[Tensor, Tensor]:
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:-1], torch.inf, dtype=torch.float32, device=q.device)
    counts = spans[:, 1].tolist()
    longest = max(counts, default=0)
    if not longest or not q.numel():
        return y, lse
    how = common_constants(q, k, causal, window)
    rows = FEW_ROWS if longest * how["GROUP"] <= FEW_ROWS else MANY_ROWS
    how |= {"ROWS": rows, "CHUNK": CHUNK}
    # Only a query that is not the last key, or has a window, hides a key of a block that is seen.
    guard = causal and (longest > 1 or window > 0)
    tiles = triton.cdiv(longest * how["GROUP"], rows)
    grid = (tiles * len(counts), how["KEY_HEADS"])
    inputs = (q.contiguous(), k.contiguous(), v.contiguous())
    spans, blocks, lengths = spans.contiguous(), blocks.contiguous(), lengths.contiguous()
    where, table = (spans, blocks, lengths), blocks.shape[1]
    chunks = triton.cdiv(table * ATTENTION_BLOCK, CHUNK)
    if rows == MANY_ROWS or chunks == 1:
        sizes = (tiles, table, window, scale)
        run(attention, grid, *inputs, y, lse, *where, *sizes, GUARD=guard, **how)
        return y, lse
    heads = q.shape[:-1].numel()
    options = {"dtype": torch.float32, "device": q.device}
    states = [torch.empty(shape, **options) for shape in ((chunks, heads), (chunks, heads))]
    states.append(torch.empty((chunks, heads, q.shape[-1]), **options))
    sizes = (tiles, table, window, heads, scale)
    run(attention_chunks, (*grid, chunks), *inputs, *states, *where, *sizes, GUARD=guard, **how)
    run(merge_chunks, grid, *states, y, lse, spans, lengths, tiles, window, heads, **how)
    return y, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    counts = spans[:, 1].tolist()
    longest = max(counts, default=0)
    if not longest or not q.numel():
        return dq, dk, dv
    how = common_constants(q, k, causal, window)
    grad, lse, heads = grad.contiguous(), lse.contiguous(), q.shape[:-1].numel()
    dots = torch.empty_like(lse)
    grid = (triton.cdiv(heads, DOT_ROWS),)
    given = (grad, out.contiguous(), dots, heads)
    run(dot_heads, grid, *given, warps=4, DEPTH=how["DEPTH"], ROWS=DOT_ROWS)
    rows = BACKWARD_ROWS
    tiles = triton.cdiv(longest, rows)
    spans, blocks, lengths = spans.contiguous(), blocks.contiguous(), lengths.contiguous()
    inputs = (grad, q.contiguous(), k.contiguous(), v.contiguous(), lse, dots)
    where = (spans, blocks, lengths, tiles, blocks.shape[1], window, scale)
    grid = (tiles * len(counts), q.shape[-2])
    run(differentiate_queries, grid, *inputs, dq, *where, ROWS=rows, **how)
    grid = (tiles * len(counts), k.shape[-2])
    run(differentiate_keys, grid, *inputs, dk, dv, *where, ROWS=rows, **how)
    return dq, dk, dv
