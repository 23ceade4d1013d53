"""The kernels of attention's backward: dq folds blocks of 64 keys left, dk and dv fold blocks of 64 queries left.

Every sample has as many queries as keys. The query heads of a group are folded in ascending order. A tile is ROWS
queries or keys of one block, and it meets all blocks that a query of its block sees, or that see a key of it. See
triton_forward.py for shapes; lse and dots are fp32 [rows, heads]. The grid is (TILES tiles of each sample, heads).
Sums start from +0, and a sum of +0 and anything is never -0: every zero is +0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.attention.triton_forward import BLOCK, load_heads, load_sample, visible_keys
from isobit.ops.gpu.elementary import exp_nonpositive, round_once, soft_cap
from isobit.ops.gpu.sums import fresh_dot, merge_columns


@triton.jit(do_not_specialize=["heads"])
def dot_heads(
    grad: tl.tensor,
    y: tl.tensor,
    dots: tl.tensor,
    heads: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Store dots [heads] = Σ grad · y over the depth, in the order of a feature axis of one segment."""
    place = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    inside, lane = place < heads, tl.arange(0, 16)[None, :]
    total = tl.zeros((ROWS, 16), tl.float32)
    for at in range(0, DEPTH, 16):
        left = tl.load(grad + place * DEPTH + at + lane, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(y + place * DEPTH + at + lane, mask=inside, other=0.0).to(tl.float32)
        total = total + left * right
    tl.store(dots + place, merge_columns(total, ROWS, 16), mask=inside)


@triton.jit
def differentiate_scores(
    products: tl.tensor,
    weight_grads: tl.tensor,
    lse: tl.tensor,
    dots: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weights exp(score − lse) and weight · (weight_grad − dot) · slope · scale; +0 where not seen."""
    scores = products * scale
    if CAPPED:
        scores, slope = soft_cap(scores, cap)
    weights = exp_nonpositive(tl.where(seen, scores - lse, -float("inf")))
    spread = weights * (weight_grads - dots)
    if CAPPED:
        spread = spread * slope
    return weights, tl.where(seen, spread * scale, 0.0)


@triton.jit(do_not_specialize=["tiles", "table", "before", "after", "size"])
def differentiate_queries(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lse: tl.tensor,
    dots: tl.tensor,
    dq: tl.tensor,
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
    ROWS: tl.constexpr,
) -> None:
    """Compute dq of ROWS queries of one query head, program_id(1)."""
    sample, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row0, count, _ = load_sample(spans, lengths, sample)
    mask = (before, after, size)
    query = tile * ROWS + tl.arange(0, ROWS)
    place, inside = (row0 + query) * (KEY_HEADS * GROUP) + head, query < count
    queries = load_heads(q, place, inside, DEPTH, PADDED)  # [ROWS, PADDED], as grads
    grads = load_heads(grad, place, inside, DEPTH, PADDED)
    sums = tl.load(lse + place, mask=inside, other=float("inf"))[:, None]  # [ROWS, 1], as products
    products = tl.load(dots + place, mask=inside, other=0.0)[:, None]
    begin, end = visible_keys(query[:, None], count, count, mask)
    own = tile * ROWS // BLOCK * BLOCK  # the first query of this block
    start, _ = visible_keys(own, count, count, mask)
    last = tl.minimum(own + BLOCK, count) - 1
    _, stop = visible_keys(last, count, count, mask)
    total = tl.zeros((ROWS, PADDED), tl.float32)
    for first in range(start // BLOCK * BLOCK, tl.where(own < count, stop, 0), BLOCK):
        key = first + tl.arange(0, BLOCK)
        at = tl.load(blocks + sample.to(tl.int64) * table + first // BLOCK)
        at = (at + tl.arange(0, BLOCK)) * KEY_HEADS + head // GROUP
        keys = load_heads(k, at, key < count, DEPTH, PADDED)  # [BLOCK, PADDED], as values
        values = load_heads(v, at, key < count, DEPTH, PADDED)
        seen = (key[None, :] >= begin) & (key[None, :] < end) & inside[:, None]
        _weights, score_grads = differentiate_scores(
            fresh_dot(queries, tl.trans(keys)),  # [ROWS, BLOCK]
            fresh_dot(grads, tl.trans(values)),  # [ROWS, BLOCK]
            sums,
            products,
            seen,
            scale,
            cap,
            CAPPED,
        )
        total = total + fresh_dot(score_grads.to(keys.dtype), keys)  # [ROWS, PADDED]
    depth = tl.arange(0, PADDED)[None, :]
    result = round_once(total, dq.dtype.element_ty)
    known = inside[:, None] & (depth < DEPTH)
    tl.store(dq + place[:, None] * DEPTH + depth, result, mask=known)


@triton.jit(do_not_specialize=["tiles", "table", "before", "after", "size"])
def differentiate_keys(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lse: tl.tensor,
    dots: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
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
    ROWS: tl.constexpr,
) -> None:
    """Compute dk and dv of ROWS keys of one key head, program_id(1)."""
    sample, tile, head = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row0, count, _ = load_sample(spans, lengths, sample)
    mask = (before, after, size)
    key = tile * ROWS + tl.arange(0, ROWS)
    own = tile * ROWS // BLOCK * BLOCK  # the first key of this block
    place = tl.load(blocks + sample.to(tl.int64) * table + own // BLOCK, mask=own < count, other=0)
    place = (place + key - own) * KEY_HEADS + head
    keys = load_heads(k, place, key < count, DEPTH, PADDED)  # [ROWS, PADDED], as values
    values = load_heads(v, place, key < count, DEPTH, PADDED)
    # The blocks of queries that see a key of this block.
    start = tl.maximum(own - tl.cdiv(after, BLOCK) * BLOCK, 0)
    stop = tl.minimum(own + BLOCK + before, ((own + BLOCK - 1) // size + 1) * size)
    stop = tl.where(own < count, tl.minimum(stop, count), 0)
    key_total = tl.zeros((ROWS, PADDED), tl.float32)
    value_total = tl.zeros((ROWS, PADDED), tl.float32)
    for member in range(GROUP):
        for first in range(start, stop, BLOCK):
            query = first + tl.arange(0, BLOCK)
            inside = query < count
            at = (row0 + query) * (KEY_HEADS * GROUP) + head * GROUP + member
            queries = load_heads(q, at, inside, DEPTH, PADDED)  # [BLOCK, PADDED], as grads
            grads = load_heads(grad, at, inside, DEPTH, PADDED)
            begin, end = visible_keys(query[None, :], count, count, mask)
            seen = (key[:, None] >= begin) & (key[:, None] < end) & inside[None, :]
            weights, score_grads = differentiate_scores(
                fresh_dot(keys, tl.trans(queries)),  # [ROWS, BLOCK]
                fresh_dot(values, tl.trans(grads)),  # [ROWS, BLOCK]
                tl.load(lse + at, mask=inside, other=float("inf"))[None, :],  # [1, BLOCK], as dots
                tl.load(dots + at, mask=inside, other=0.0)[None, :],
                seen,
                scale,
                cap,
                CAPPED,
            )
            value_total = value_total + fresh_dot(weights.to(grads.dtype), grads)  # [ROWS, PADDED]
            key_total = key_total + fresh_dot(score_grads.to(queries.dtype), queries)
    depth = tl.arange(0, PADDED)[None, :]
    known = (key < count)[:, None] & (depth < DEPTH)
    to = place[:, None] * DEPTH + depth
    tl.store(dk + to, round_once(key_total, dk.dtype.element_ty), mask=known)
    tl.store(dv + to, round_once(value_total, dv.dtype.element_ty), mask=known)
