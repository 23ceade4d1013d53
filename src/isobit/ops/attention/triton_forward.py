"""The kernels of attention's forward. Two forms with one order; triton_states.py has the order.

`attention` folds all chunks of CHUNK keys in one program, for many queries. `attention_chunks` computes one chunk per
program (split-KV) and `merge_chunks` folds them, for few queries. The grid is (TILES tiles of ROWS rows of each sample,
KEY_HEADS), and (..., chunks) for `attention_chunks`. See triton_blocks.py for shapes; lse is fp32 [rows, heads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.attention.triton_blocks import (
    BLOCK,
    load_heads,
    load_sample,
    locate_heads,
    visible_keys,
)
from isobit.ops.attention.triton_states import fold_chunk, merge_states, store_rows


@triton.jit
def tile_of_queries(
    tile: tl.tensor,
    QUERIES: tl.tensor,
    KEYS: tl.tensor,
    WINDOW: tl.tensor,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first and the last query of a tile, and the keys (from, to before) that one of them sees.

    A tile beyond the queries of its sample sees none.
    """
    first = tile * ROWS // GROUP
    last = tl.minimum(((tile + 1) * ROWS - 1) // GROUP, QUERIES - 1)
    start, _ = visible_keys(first, QUERIES, KEYS, WINDOW, CAUSAL, WINDOWED)
    _, stop = visible_keys(last, QUERIES, KEYS, WINDOW, CAUSAL, WINDOWED)
    return first, last, start, tl.where(first < QUERIES, stop, 0)


@triton.jit(do_not_specialize=["TILES", "TABLE", "WINDOW"])
def attention(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    y: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    blocks: tl.tensor,
    lengths: tl.tensor,
    TILES: tl.tensor,
    TABLE: tl.tensor,
    WINDOW: tl.tensor,
    SCALE: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GUARD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute ROWS rows of one group of heads over all keys they see."""
    sample, tile, head = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    row0, QUERIES, KEYS = load_sample(spans, lengths, sample)
    first_query, last_query, start, stop = tile_of_queries(
        tile, QUERIES, KEYS, WINDOW, GROUP, CAUSAL, WINDOWED, ROWS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < QUERIES * GROUP
    queries = load_heads(q, place, inside, DEPTH, PADDED)
    begin, end = visible_keys((row // GROUP)[:, None], QUERIES, KEYS, WINDOW, CAUSAL, WINDOWED)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, PADDED), tl.float32)
    for chunk in range(start // CHUNK * CHUNK, stop, CHUNK):
        later_most, later_total, later_output = fold_chunk(
            queries,
            row // GROUP,
            k,
            v,
            blocks + sample.to(tl.int64) * TABLE,
            head,
            tl.maximum(chunk, start // BLOCK * BLOCK),
            tl.minimum(stop, chunk + CHUNK),
            first_query,
            last_query,
            QUERIES,
            KEYS,
            WINDOW,
            SCALE,
            KEY_HEADS,
            DEPTH,
            PADDED,
            CAUSAL,
            WINDOWED,
            GUARD,
            ROWS,
        )
        most, total, output = merge_states(
            most, total, output, later_most, later_total, later_output, chunk, begin, end, CHUNK
        )
    store_rows(y, lse, most, total, output, place, inside, DEPTH, PADDED)


@triton.jit(do_not_specialize=["TILES", "TABLE", "WINDOW", "HEADS"])
def attention_chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    most_of: tl.tensor,
    total_of: tl.tensor,
    output_of: tl.tensor,
    spans: tl.tensor,
    blocks: tl.tensor,
    lengths: tl.tensor,
    TILES: tl.tensor,
    TABLE: tl.tensor,
    WINDOW: tl.tensor,
    HEADS: tl.tensor,
    SCALE: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    GUARD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute the state of ROWS rows over one chunk, program_id(2).

    most_of and total_of are fp32 [chunks, HEADS], output_of has DEPTH more; HEADS is the number of rows · heads of q.
    """
    sample, tile, head = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    chunk = tl.program_id(2) * CHUNK
    row0, QUERIES, KEYS = load_sample(spans, lengths, sample)
    first_query, last_query, start, stop = tile_of_queries(
        tile, QUERIES, KEYS, WINDOW, GROUP, CAUSAL, WINDOWED, ROWS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < QUERIES * GROUP
    most, total, output = fold_chunk(
        load_heads(q, place, inside, DEPTH, PADDED),
        row // GROUP,
        k,
        v,
        blocks + sample.to(tl.int64) * TABLE,
        head,
        tl.maximum(chunk, start // BLOCK * BLOCK),
        tl.minimum(stop, chunk + CHUNK),
        first_query,
        last_query,
        QUERIES,
        KEYS,
        WINDOW,
        SCALE,
        KEY_HEADS,
        DEPTH,
        PADDED,
        CAUSAL,
        WINDOWED,
        GUARD,
        ROWS,
    )
    place = (place + tl.program_id(2).to(tl.int64) * HEADS)[:, None]
    depth = tl.arange(0, PADDED)[None, :]
    tl.store(most_of + place, most, mask=inside[:, None])
    tl.store(total_of + place, total, mask=inside[:, None])
    known = inside[:, None] & (depth < DEPTH)
    tl.store(output_of + place * DEPTH + depth, output, mask=known)


@triton.jit(do_not_specialize=["TILES", "WINDOW", "HEADS"])
def merge_chunks(
    most_of: tl.tensor,
    total_of: tl.tensor,
    output_of: tl.tensor,
    y: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    lengths: tl.tensor,
    TILES: tl.tensor,
    WINDOW: tl.tensor,
    HEADS: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Fold the chunks of ROWS rows left, and store them."""
    sample, tile, head = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1)
    row0, QUERIES, KEYS = load_sample(spans, lengths, sample)
    _, _, start, stop = tile_of_queries(tile, QUERIES, KEYS, WINDOW, GROUP, CAUSAL, WINDOWED, ROWS)
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < QUERIES * GROUP
    begin, end = visible_keys((row // GROUP)[:, None], QUERIES, KEYS, WINDOW, CAUSAL, WINDOWED)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, PADDED), tl.float32)
    for chunk in range(start // CHUNK, tl.cdiv(stop, CHUNK)):
        at = place + tl.cast(chunk, tl.int64) * HEADS
        most, total, output = merge_states(
            most,
            total,
            output,
            tl.load(most_of + at[:, None], mask=inside[:, None], other=0.0),
            tl.load(total_of + at[:, None], mask=inside[:, None], other=0.0),
            load_heads(output_of, at, inside, DEPTH, PADDED),
            chunk * CHUNK,
            begin,
            end,
            CHUNK,
        )
    store_rows(y, lse, most, total, output, place, inside, DEPTH, PADDED)
