"""What the Triton kernels of attention share: which keys a query sees, rows of tiles, and blocks of keys in memory.

Shapes: q and y [rows, KEY_HEADS * GROUP, DEPTH], k and v [keys, KEY_HEADS, DEPTH], all contiguous. `spans` is int64
[samples, 2], the first row and the number of queries of a sample; `blocks` int64 [samples, TABLE], the row of k and v
at which each block of 64 keys begins; `lengths` int64 [samples], the number of keys. The queries are the last positions
of their sample. A row of a tile is one head of one query: row r of a sample is query r // GROUP and head r % GROUP of a
group. A depth that is no power of two is padded with +0 to PADDED.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(64)


@triton.jit
def visible_keys(
    query: tl.tensor,
    QUERIES: tl.tensor,
    KEYS: tl.tensor,
    WINDOW: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return (begin, end): the keys from begin to before end are those that a query of the sample sees."""
    end = query * 0 + KEYS
    if CAUSAL:
        end = tl.minimum(KEYS - QUERIES + query + 1, KEYS)
    begin = end * 0
    if WINDOWED:
        begin = tl.maximum(end - WINDOW, 0)
    return begin, end


@triton.jit
def load_sample(
    spans: tl.tensor, lengths: tl.tensor, sample: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the first row, the number of queries and the number of keys of a sample."""
    first = tl.load(spans + 2 * sample)
    queries = tl.load(spans + 2 * sample + 1).to(tl.int32)
    return first, queries, tl.load(lengths + sample).to(tl.int32)


@triton.jit
def locate_heads(
    first: tl.tensor, row: tl.tensor, head: tl.tensor, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr
) -> tl.tensor:
    """Return int64 [ROWS], the index of each row's head in q, y and lse; `first` is the sample's first row."""
    return (first + row // GROUP) * (KEY_HEADS * GROUP) + head * GROUP + row % GROUP


@triton.jit
def load_heads(
    x: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Return [ROWS, PADDED], the heads of x at place [ROWS]; +0 where not inside [ROWS], and beyond the depth."""
    depth = tl.arange(0, PADDED)[None, :]
    known = inside[:, None] & (depth < DEPTH)
    return tl.load(x + place[:, None] * DEPTH + depth, mask=known, other=0.0)


@triton.jit
def load_heads_transposed(
    x: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """Return [PADDED, ROWS]: as load_heads, with the depth first."""
    depth = tl.arange(0, PADDED)[:, None]
    known = inside[None, :] & (depth < DEPTH)
    return tl.load(x + place[None, :] * DEPTH + depth, mask=known, other=0.0)
