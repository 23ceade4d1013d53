"""Attention forward by online softmax: blocks of 64 keys inside chunks of CHUNK keys, then the chunks, all folded left.

See [Note: chunks of keys] in isobit/ops/attention/portable.py for the state (most, total, output) of a query and for
the merge. Two kernels with one order: `attention` folds all chunks in one program, for many queries. `attention_chunks`
computes one chunk per program (split-KV) and `merge_chunks` folds them, for few queries.

Shapes: q and y [QUERIES, KEY_HEADS * GROUP, DEPTH], k and v [KEYS, KEY_HEADS, DEPTH], all contiguous. The queries are
the last ones of the sample. A row of a tile is one head of one query: row r is query r // GROUP and head
r % GROUP of the group. The grid is (tiles of rows, KEY_HEADS), and (..., chunks) for `attention_chunks`.
A block of which a row sees no key is not folded into that row, so that the expression of a row does not depend on
the tile. Values of keys that a row does not see must be finite: their weight is +0, and 0 · inf is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.compiled.kernels.elementary import exp_nonpositive, round_once
from isobit.compiled.kernels.sums import fresh_dot, merge_columns

BLOCK = tl.constexpr(64)


@triton.jit
def add_lanes(weights: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Return [ROWS, 1], the sums of weights [ROWS, 64] by 16 interleaved lanes, merged by the tree."""
    quarters = tl.permute(tl.reshape(weights, (ROWS, 2, 2, 16)), (0, 3, 1, 2))
    even, odd = tl.split(quarters)  # quarters 0, 2 and quarters 1, 3
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    lanes = (((0.0 + first) + second) + third) + fourth
    return merge_columns(lanes, ROWS, 16)


@triton.jit
def rows_of_program(
    QUERIES: tl.tensor, KEYS: tl.tensor, GROUP: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the rows [ROWS] of this program, the last key [ROWS, 1] that each sees, and the end of those keys."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = (KEYS - QUERIES + row // GROUP)[:, None]
    last = KEYS - QUERIES + ((tl.program_id(0) + 1) * ROWS - 1) // GROUP
    return row, position, tl.minimum(last + 1, KEYS)


@triton.jit
def load_queries(
    q: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    QUERIES: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """Return [ROWS, DEPTH], the queries of the rows [ROWS] of one group of heads."""
    place = (row // GROUP) * KEY_HEADS * GROUP + head * GROUP + row % GROUP
    place = place[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    return tl.load(q + place, mask=(row < QUERIES * GROUP)[:, None], other=0.0)


@triton.jit
def fold_chunk(
    queries: tl.tensor,
    position: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    KEYS: tl.tensor,
    SCALE: tl.tensor,
    KEY_HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state of the rows over the keys from `start` to `stop`, which fold blocks of 64 keys left.

    queries [ROWS, DEPTH]; position [ROWS, 1] is the last key that a row sees. Returns most and total [ROWS, 1] and
    output [ROWS, DEPTH].
    """
    depth = tl.arange(0, DEPTH)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, DEPTH), tl.float32)
    for first in range(start, stop, BLOCK):
        key = first + tl.arange(0, BLOCK)
        place = (key * KEY_HEADS + head) * DEPTH
        keys = tl.load(k + place[None, :] + depth[:, None], mask=key[None, :] < KEYS, other=0.0)
        scores = fresh_dot(queries, keys) * SCALE  # [ROWS, 64]
        scores = tl.where(key[None, :] <= position, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1)[:, None])
        base = tl.where(new == -float("inf"), 0.0, new)
        factor = exp_nonpositive(most - base)
        weights = exp_nonpositive(scores - base)
        values = tl.load(v + place[:, None] + depth[None, :], mask=key[:, None] < KEYS, other=0.0)
        added = fresh_dot(weights.to(values.dtype), values)
        seen = first <= position
        output = tl.where(seen, output * factor + added, output)
        total = tl.where(seen, total * factor + add_lanes(weights, ROWS), total)
        most = tl.where(seen, new, most)
    return most, total, output


@triton.jit
def merge_states(
    most: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    later_most: tl.tensor,
    later_total: tl.tensor,
    later_output: tl.tensor,
    seen: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state of both for the rows that have seen a key of the later one, else the earlier one."""
    new = tl.maximum(most, later_most)
    base = tl.where(new == -float("inf"), 0.0, new)
    left = exp_nonpositive(most - base)
    right = exp_nonpositive(later_most - base)
    output = tl.where(seen, output * left + later_output * right, output)
    total = tl.where(seen, total * left + later_total * right, total)
    return tl.where(seen, new, most), total, output


@triton.jit
def store_rows(
    y: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    QUERIES: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Divide by the sum and store; a zero is +0, and a row that sees no key is +0."""
    divisor = tl.where(total == 0.0, 1.0, total)  # the output is +0 there
    dividend, divisor = tl.broadcast(output + 0.0, divisor)
    result = round_once(tl.div_rn(dividend, divisor), y.dtype.element_ty)
    place = (row // GROUP) * KEY_HEADS * GROUP + head * GROUP + row % GROUP
    place = place[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]
    inside = (row < QUERIES * GROUP)[:, None]
    tl.store(y + place, result, mask=inside)


@triton.jit
def attention(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    y: tl.tensor,
    QUERIES: tl.tensor,
    KEYS: tl.tensor,
    SCALE: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute ROWS rows of one group of heads over all keys they see."""
    head = tl.program_id(1)
    row, position, stop = rows_of_program(QUERIES, KEYS, GROUP, ROWS)
    queries = load_queries(q, row, head, QUERIES, KEY_HEADS, GROUP, DEPTH)
    most, total, output = fold_chunk(
        queries,
        position,
        k,
        v,
        head,
        0,
        tl.minimum(stop, CHUNK),
        KEYS,
        SCALE,
        KEY_HEADS,
        DEPTH,
        ROWS,
    )
    for start in range(CHUNK, stop, CHUNK):
        later_most, later_total, later_output = fold_chunk(
            queries,
            position,
            k,
            v,
            head,
            start,
            tl.minimum(stop, start + CHUNK),
            KEYS,
            SCALE,
            KEY_HEADS,
            DEPTH,
            ROWS,
        )
        most, total, output = merge_states(
            most, total, output, later_most, later_total, later_output, start <= position
        )
    store_rows(y, total, output, row, head, QUERIES, KEY_HEADS, GROUP, DEPTH)


@triton.jit
def attention_chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    most_of: tl.tensor,
    total_of: tl.tensor,
    output_of: tl.tensor,
    QUERIES: tl.tensor,
    KEYS: tl.tensor,
    SCALE: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute the state of ROWS rows over one chunk, program_id(2).

    most_of and total_of are fp32 [chunks, KEY_HEADS, rows], output_of has DEPTH more, with rows = QUERIES * GROUP.
    """
    head, chunk = tl.program_id(1), tl.program_id(2)
    row, position, stop = rows_of_program(QUERIES, KEYS, GROUP, ROWS)
    stop = tl.minimum(stop, (chunk + 1) * CHUNK)
    queries = load_queries(q, row, head, QUERIES, KEY_HEADS, GROUP, DEPTH)
    most, total, output = fold_chunk(
        queries, position, k, v, head, chunk * CHUNK, stop, KEYS, SCALE, KEY_HEADS, DEPTH, ROWS
    )
    place = ((chunk * KEY_HEADS + head) * QUERIES * GROUP + row)[:, None]
    inside = (row < QUERIES * GROUP)[:, None]
    tl.store(most_of + place, most, mask=inside)
    tl.store(total_of + place, total, mask=inside)
    tl.store(output_of + place * DEPTH + tl.arange(0, DEPTH)[None, :], output, mask=inside)


@triton.jit
def merge_chunks(
    most_of: tl.tensor,
    total_of: tl.tensor,
    output_of: tl.tensor,
    y: tl.tensor,
    QUERIES: tl.tensor,
    KEYS: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Fold the chunks of ROWS rows left, and store them."""
    head = tl.program_id(1)
    row, position, _ = rows_of_program(QUERIES, KEYS, GROUP, ROWS)
    inside = (row < QUERIES * GROUP)[:, None]
    place = (head * QUERIES * GROUP + row)[:, None]
    depth = tl.arange(0, DEPTH)[None, :]
    most = tl.load(most_of + place, mask=inside, other=0.0)
    total = tl.load(total_of + place, mask=inside, other=0.0)
    output = tl.load(output_of + place * DEPTH + depth, mask=inside, other=0.0)
    for start in range(CHUNK, KEYS, CHUNK):
        place += KEY_HEADS * QUERIES * GROUP
        most, total, output = merge_states(
            most,
            total,
            output,
            tl.load(most_of + place, mask=inside, other=0.0),
            tl.load(total_of + place, mask=inside, other=0.0),
            tl.load(output_of + place * DEPTH + depth, mask=inside, other=0.0),
            start <= position,
        )
    store_rows(y, total, output, row, head, QUERIES, KEY_HEADS, GROUP, DEPTH)
