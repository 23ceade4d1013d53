"""The kernels of attention's forward. Two forms with one order: [Note: chunks of keys] in portable.py.

`attention` folds all chunks of CHUNK keys in one program, for many queries. `attention_chunks` computes one chunk per
program (split-KV) and `merge_chunks` folds them, for few queries. The grid is (TILES tiles of ROWS rows of each sample,
KEY_HEADS), and (..., chunks) for `attention_chunks`. Shapes are below; lse is fp32 [rows, heads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import exp_nonpositive, log_positive, round_once, soft_cap
from isobit.ops.gpu.sums import fresh_dot, merge_columns

# What the Triton kernels of attention share: which keys a query sees, rows of tiles, and blocks of keys in memory.
#
# Shapes: q and y [rows, KEY_HEADS * GROUP, DEPTH], k and v [keys, KEY_HEADS, DEPTH], all contiguous. `spans` is int64
# [samples, 2], the first row and the number of queries of a sample; `blocks` int64 [samples, TABLE], the row of k and
# v at which each block of 64 keys begins; `lengths` int64 [samples], the number of keys. The queries are the last
# positions of their sample. A row of a tile is one head of one query: row r of a sample is query r // GROUP and head
# r % GROUP of a group. A depth that is no power of two is padded with +0 to PADDED.
#
# `mask` is (before, after, size): how many keys before and after its own position a query sees, and the size of the
# chunks of positions that it does not see beyond. One that is no limit is the number of keys of the table.

BLOCK = tl.constexpr(64)


@triton.jit
def visible_keys(
    query: tl.tensor, query_count: tl.tensor, key_count: tl.tensor, mask: tl.tuple
) -> tuple[tl.tensor, tl.tensor]:
    """Return (begin, end): the keys from begin to before end are those that a query of the sample sees."""
    before, after, size = mask
    position = key_count - query_count + query
    begin = tl.maximum(position - before, position // size * size)
    end = tl.minimum(position + 1 + after, key_count)
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


# Online softmax in Triton: the state of queries over the blocks of a chunk of keys, and over chunks, folded left.
#
# See [Note: chunks of keys] in isobit/ops/attention/portable.py for the state (most, total, output) of a query and for
# the merge.
#
# A block or chunk of which a row sees no key is not folded into that row, so that the expression of a row does not
# depend on the tile. A key that a row does not see has the weight +0. Its value adds nothing if it is finite; GUARD
# adds the code for values that are not, because 0 · inf is NaN.


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
def add_seen_values(
    weights: tl.tensor,
    values: tl.tensor,
    key: tl.tensor,
    query: tl.tensor,
    first_query: tl.tensor,
    last_query: tl.tensor,
    query_count: tl.tensor,
    key_count: tl.tensor,
    mask: tl.tuple,
) -> tl.tensor:
    """Return weights [ROWS, 64] · values [64, PADDED], where a query adds only the values that it sees."""
    added = tl.zeros((weights.shape[0], values.shape[1]), tl.float32)
    for each in range(first_query, last_query + 1):
        begin, end = visible_keys(each, query_count, key_count, mask)
        seen = (key >= begin) & (key < end)
        own = fresh_dot(weights, tl.where(seen[:, None], values, 0.0))
        added = tl.where((query == each)[:, None], own, added)
    return added


@triton.jit
def fold_chunk(
    queries: tl.tensor,
    query: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    blocks: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first_query: tl.tensor,
    last_query: tl.tensor,
    query_count: tl.tensor,
    key_count: tl.tensor,
    mask: tl.tuple,
    scale: tl.tensor,
    cap: tl.tensor,
    KEY_HEADS: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    GUARD: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state of the rows over the blocks from `start` to before `stop`, folded left.

    queries [ROWS, PADDED]; query [ROWS] is the query of each row, from first_query to last_query; `blocks` points to
    the blocks of the sample. Returns most and total [ROWS, 1] and output [ROWS, PADDED].
    """
    begin, end = visible_keys(query[:, None], query_count, key_count, mask)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, PADDED), tl.float32)
    for first in range(start, stop, BLOCK):
        key = first + tl.arange(0, BLOCK)
        place = (tl.load(blocks + first // BLOCK) + tl.arange(0, BLOCK)) * KEY_HEADS + head
        keys = load_heads_transposed(k, place, key < key_count, DEPTH, PADDED)  # [PADDED, 64]
        scores = fresh_dot(queries, keys) * scale  # [ROWS, 64]
        if CAPPED:
            scores, _ = soft_cap(scores, cap)
        seen = (key[None, :] >= begin) & (key[None, :] < end)
        scores = tl.where(seen, scores, -float("inf"))
        new = tl.maximum(most, tl.max(scores, 1)[:, None])
        base = tl.where(new == -float("inf"), 0.0, new)
        factor = exp_nonpositive(most - base)
        weights = exp_nonpositive(scores - base)
        values = load_heads(v, place, key < key_count, DEPTH, PADDED)  # [64, PADDED]
        added = fresh_dot(weights.to(values.dtype), values)  # [ROWS, PADDED]
        if GUARD:
            whole_from, _ = visible_keys(last_query, query_count, key_count, mask)
            _, whole_to = visible_keys(first_query, query_count, key_count, mask)
            if first < whole_from or tl.minimum(first + BLOCK, key_count) > whole_to:
                special = (tl.abs(values.to(tl.float32)) < float("inf")).to(tl.int32)
                if tl.min(tl.min(special, 1), 0) == 0:
                    added = add_seen_values(
                        weights.to(values.dtype),
                        values,
                        key,
                        query,
                        first_query,
                        last_query,
                        query_count,
                        key_count,
                        mask,
                    )
        folds = (first < end) & (first + BLOCK > begin)  # [ROWS, 1]: whether a row sees a key
        output = tl.where(folds, output * factor + added, output)
        total = tl.where(folds, total * factor + add_lanes(weights, ROWS), total)
        most = tl.where(folds, new, most)
    return most, total, output


@triton.jit
def merge_states(
    most: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    later_most: tl.tensor,
    later_total: tl.tensor,
    later_output: tl.tensor,
    start: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the state with the chunk from `start` on, where a row sees a key of it; begin and end are [ROWS, 1].

    The first chunk of which a row sees a key is its state.
    """
    new = tl.maximum(most, later_most)
    base = tl.where(new == -float("inf"), 0.0, new)
    left = exp_nonpositive(most - base)
    right = exp_nonpositive(later_most - base)
    later = begin < start
    new_output = tl.where(later, output * left + later_output * right, later_output)
    new_total = tl.where(later, total * left + later_total * right, later_total)
    new = tl.where(later, new, later_most)
    seen = (start < end) & (start + CHUNK > begin)
    return (
        tl.where(seen, new, most),
        tl.where(seen, new_total, total),
        tl.where(seen, new_output, output),
    )


@triton.jit
def store_rows(
    y: tl.tensor,
    lse: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    place: tl.tensor,
    inside: tl.tensor,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Store the rows at place [ROWS]: output / total with every zero +0, and most + log(total).

    Where the total is 0, that of no keys or of scores of -inf, y is +0 and lse +inf.
    """
    depth = tl.arange(0, PADDED)[None, :]
    dividend, divisor = tl.broadcast(output + 0.0, total)
    # Compared as a tile: Triton would else compare [ROWS, 1] and move the answers, which have no name of a comparison.
    zero = tl.where(depth < PADDED, 0.0, 1.0)
    quotient = tl.where(divisor == zero, 0.0, tl.div_rn(dividend, divisor))
    tl.store(
        y + place[:, None] * DEPTH + depth,
        round_once(quotient, y.dtype.element_ty),
        mask=inside[:, None] & (depth < DEPTH),
    )
    none = total == 0.0  # [ROWS, 1]
    sums = tl.where(none, float("inf"), most + log_positive(tl.where(none, 1.0, total)))
    tl.store(lse + place[:, None], sums, mask=inside[:, None])


@triton.jit
def tile_of_queries(
    tile: tl.tensor,
    query_count: tl.tensor,
    key_count: tl.tensor,
    mask: tl.tuple,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first and the last query of a tile, and the keys (from, to before) that one of them sees.

    A tile beyond the queries of its sample sees none.
    """
    first = tile * ROWS // GROUP
    last = tl.minimum(((tile + 1) * ROWS - 1) // GROUP, query_count - 1)
    start, _ = visible_keys(first, query_count, key_count, mask)
    _, stop = visible_keys(last, query_count, key_count, mask)
    return first, last, start, tl.where(first < query_count, stop, 0)


@triton.jit(do_not_specialize=["tiles", "table", "before", "after", "size"])
def attention(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    y: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    blocks: tl.tensor,
    lengths: tl.tensor,
    tiles: tl.tensor,
    table: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    GUARD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute ROWS rows of one group of heads over all keys they see."""
    sample, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row0, query_count, key_count = load_sample(spans, lengths, sample)
    mask = (before, after, size)
    first_query, last_query, start, stop = tile_of_queries(
        tile, query_count, key_count, mask, GROUP, ROWS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < query_count * GROUP
    queries = load_heads(q, place, inside, DEPTH, PADDED)  # [ROWS, PADDED]
    begin, end = visible_keys((row // GROUP)[:, None], query_count, key_count, mask)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, PADDED), tl.float32)
    for chunk in range(start // CHUNK * CHUNK, stop, CHUNK):
        later_most, later_total, later_output = fold_chunk(
            queries,
            row // GROUP,
            k,
            v,
            blocks + sample.to(tl.int64) * table,
            head,
            tl.maximum(chunk, start // BLOCK * BLOCK),
            tl.minimum(stop, chunk + CHUNK),
            first_query,
            last_query,
            query_count,
            key_count,
            mask,
            scale,
            cap,
            KEY_HEADS,
            DEPTH,
            PADDED,
            CAPPED,
            GUARD,
            ROWS,
        )
        most, total, output = merge_states(
            most, total, output, later_most, later_total, later_output, chunk, begin, end, CHUNK
        )
    store_rows(y, lse, most, total, output, place, inside, DEPTH, PADDED)


@triton.jit(do_not_specialize=["tiles", "table", "before", "after", "size", "heads"])
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
    tiles: tl.tensor,
    table: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    GUARD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute the state of ROWS rows over one chunk, program_id(2).

    most_of and total_of are fp32 [chunks, heads], output_of has DEPTH more; heads is the number of rows · heads of q.
    """
    sample, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    chunk = tl.program_id(2) * CHUNK
    row0, query_count, key_count = load_sample(spans, lengths, sample)
    mask = (before, after, size)
    first_query, last_query, start, stop = tile_of_queries(
        tile, query_count, key_count, mask, GROUP, ROWS
    )
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < query_count * GROUP
    most, total, output = fold_chunk(
        load_heads(q, place, inside, DEPTH, PADDED),  # [ROWS, PADDED]
        row // GROUP,
        k,
        v,
        blocks + sample.to(tl.int64) * table,
        head,
        tl.maximum(chunk, start // BLOCK * BLOCK),
        tl.minimum(stop, chunk + CHUNK),
        first_query,
        last_query,
        query_count,
        key_count,
        mask,
        scale,
        cap,
        KEY_HEADS,
        DEPTH,
        PADDED,
        CAPPED,
        GUARD,
        ROWS,
    )
    place = (place + tl.program_id(2).to(tl.int64) * heads)[:, None]
    depth = tl.arange(0, PADDED)[None, :]
    tl.store(most_of + place, most, mask=inside[:, None])
    tl.store(total_of + place, total, mask=inside[:, None])
    known = inside[:, None] & (depth < DEPTH)
    tl.store(output_of + place * DEPTH + depth, output, mask=known)


@triton.jit(do_not_specialize=["tiles", "before", "after", "size", "heads"])
def merge_chunks(
    most_of: tl.tensor,
    total_of: tl.tensor,
    output_of: tl.tensor,
    y: tl.tensor,
    lse: tl.tensor,
    spans: tl.tensor,
    lengths: tl.tensor,
    tiles: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    size: tl.tensor,
    heads: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Fold the chunks of ROWS rows left, and store them."""
    sample, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row0, query_count, key_count = load_sample(spans, lengths, sample)
    mask = (before, after, size)
    _, _, start, stop = tile_of_queries(tile, query_count, key_count, mask, GROUP, ROWS)
    row = tile * ROWS + tl.arange(0, ROWS)
    place, inside = locate_heads(row0, row, head, KEY_HEADS, GROUP), row < query_count * GROUP
    begin, end = visible_keys((row // GROUP)[:, None], query_count, key_count, mask)
    most = tl.full((ROWS, 1), -float("inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    output = tl.zeros((ROWS, PADDED), tl.float32)
    for chunk in range(start // CHUNK, tl.cdiv(stop, CHUNK)):
        at = place + tl.cast(chunk, tl.int64) * heads
        most, total, output = merge_states(
            most,
            total,
            output,
            tl.load(most_of + at[:, None], mask=inside[:, None], other=0.0),  # [ROWS, 1]
            tl.load(total_of + at[:, None], mask=inside[:, None], other=0.0),
            load_heads(output_of, at, inside, DEPTH, PADDED),  # [ROWS, PADDED]
            chunk * CHUNK,
            begin,
            end,
            CHUNK,
        )
    store_rows(y, lse, most, total, output, place, inside, DEPTH, PADDED)
