"""Kernels of the delta rule, backward: from the last chunk of a sample to the first.

`pull_chunks` goes through the chunks with one head and BLOCK columns of the values per program, as forward does, and
stores the gradient of new values and of the state that each chunk leaves. Then all chunks are independent:
`relate_gradients` sums over the values what two rows have to do with each other, and `pull_features` the gradients of
queries and keys; `add_heads` adds those of heads that read the same keys. Every chain has the order of
`backward_of_chunk` in portable.py.

Shapes are those of [Note: the delta rule on a GPU] in triton_chunks.py. `states` and `laters` are fp32 [chunks, H, DK,
DV], the state at a chunk's start and the gradient of the one that it leaves; `kept` is fp32 [5, TOKENS, H, DV]: new
values, k S, q S, k · later, and the gradient of new values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.delta_rule.triton_chunks import CHUNK, fma_outer, negative, pick_row, read_chunk
from isobit.ops.gpu.elementary import round_once


@triton.jit(do_not_specialize=["tokens"])
def pull_chunks(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    table: tl.tensor,
    bounds: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    pairs: tl.tensor,
    laters: tl.tensor,
    kept: tl.tensor,
    dv: tl.tensor,
    tokens: tl.tensor,
    KEY_HEADS: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store dv, the gradients of new values, and those of the states; program_id(0) is the sample."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DV
    row, feature = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    key_head, size = head // (H // KEY_HEADS), tokens.to(tl.int64) * (H * DV)
    begin, end = tl.load(bounds + number), tl.load(bounds + number + 1)
    for back in range(end - begin):
        at = end - 1 - back
        first, _, count, _ = read_chunk(table, at)
        has_later = back > 0
        fresh = row < count
        own = (at * H + head) * CHUNK
        later = laters + (at * H + head) * (DK * DV)
        rate = tl.load(beta + (first + row) * H + head, mask=fresh, other=0.0).to(tl.float32)
        # The gradient of new values: through the state that is left, through o, and through later rows.
        taken = tl.zeros((CHUNK, BLOCK), tl.float32)
        for d in range(DK):
            keys = tl.load(
                k + ((first + row) * KEY_HEADS + key_head) * DK + d,
                mask=fresh & has_later,
                other=0.0,
            )
            values = tl.load(later + d * DV + column, mask=inside & has_later, other=0.0)
            taken = fma_outer(keys.to(tl.float32), values, taken)
        remaining = tl.load(rest + own + row)[:, None]
        dnew = tl.where(has_later, remaining * taken, 0.0)
        for step in range(count):
            t = count - 1 - step
            upstream = tl.load(
                grad + ((first + t) * H + head) * DV + column, mask=inside, other=0.0
            ).to(tl.float32)
            pair = pairs + own * (3 * CHUNK) + t * CHUNK + row
            between = tl.load(pair + 2 * CHUNK * CHUNK)
            weight = tl.load(pair + CHUNK * CHUNK) * between
            dnew = tl.where((row <= t)[:, None], fma_outer(weight, upstream, dnew), dnew)
            factor = pick_row(rate, t, 0) * tl.load(pair) * between
            pulled = pick_row(dnew, t, 0)
            dnew = tl.where((row < t)[:, None], fma_outer(negative(factor), pulled, dnew), dnew)
        place = ((first + row) * H + head)[:, None] * DV + column[None, :]
        stored = fresh[:, None] & inside[None, :]
        tl.store(kept + 3 * size + place, taken, mask=stored)
        tl.store(kept + 4 * size + place, dnew, mask=stored)
        tl.store(dv + place, round_once(rate[:, None] * dnew, dv.dtype.element_ty), mask=stored)
        # The gradient of the state at the chunk's start, which the chunk before it leaves.
        tile = feature[:, None] * DV + column[None, :]
        in_tile = (feature < DK)[:, None] & inside[None, :]
        held = tl.load(later + tile, mask=in_tile & has_later, other=0.0)
        last = tl.load(decay + own + count - 1)
        earlier = tl.where(has_later, last * held, 0.0)
        for t in range(count):
            fade, token = tl.load(decay + own + t), first + t
            upstream = tl.load(grad + (token * H + head) * DV + column, mask=inside, other=0.0)
            own_row = (token * KEY_HEADS + key_head) * DK + feature
            queries = tl.load(q + own_row, mask=feature < DK, other=0.0).to(tl.float32)
            keys = tl.load(k + own_row, mask=feature < DK, other=0.0).to(tl.float32)
            earlier = fma_outer(queries, fade * upstream.to(tl.float32), earlier)
            scale = negative(pick_row(rate, t, 0) * fade)
            earlier = fma_outer(keys, scale * pick_row(dnew, t, 0), earlier)
        if at > begin:
            tl.store(later - H * DK * DV + tile, earlier, mask=in_tile)
        tl.debug_barrier()  # other warps read what was stored


@triton.jit(do_not_specialize=["tokens"])
def relate_gradients(
    grad: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    table: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    pairs: tl.tensor,
    states: tl.tensor,
    laters: tl.tensor,
    kept: tl.tensor,
    by: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    tokens: tl.tensor,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Store dg and dbeta of a chunk's rows, and by fp32 [chunks, H, 2, 64, 64]: gradients of q_t·k_j and −k_t·k_j."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, _, count, _ = read_chunk(table, number)
    has_later = tl.load(table + number * 5 + 4) != 0
    row, feature = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    fresh, size = row < count, tokens.to(tl.int64) * (H * DV)
    own = (number * H + head) * CHUNK
    rate = tl.load(beta + (first + row) * H + head, mask=fresh, other=0.0).to(tl.float32)
    fade = tl.load(decay + own + row)
    corrections = tl.zeros((CHUNK, CHUNK), tl.float32)
    by_q = tl.zeros((CHUNK, CHUNK), tl.float32)
    taken_new = tl.zeros((CHUNK,), tl.float32)
    of_rate = tl.zeros((CHUNK,), tl.float32)
    asked = tl.zeros((CHUNK,), tl.float32)
    read = tl.zeros((CHUNK,), tl.float32)
    held = tl.zeros((WIDE,), tl.float32)
    for e in range(DV):
        place = ((first + row) * H + head) * DV + e
        new = tl.load(kept + place, mask=fresh, other=0.0)
        reads = tl.load(kept + size + place, mask=fresh, other=0.0)
        asks = tl.load(kept + 2 * size + place, mask=fresh, other=0.0)
        taken = tl.load(kept + 3 * size + place, mask=fresh, other=0.0)
        dnew = tl.load(kept + 4 * size + place, mask=fresh, other=0.0)
        upstream = tl.load(grad + place, mask=fresh, other=0.0).to(tl.float32)
        value = tl.load(v + place, mask=fresh, other=0.0).to(tl.float32)
        corrections = fma_outer(dnew, new, corrections)
        by_q = fma_outer(upstream, new, by_q)
        taken_new = tl.math.fma(taken, new, taken_new)
        of_rate = tl.math.fma(dnew, value - fade * reads, of_rate)
        asked = tl.math.fma(upstream, asks, asked)
        read = tl.math.fma(dnew, reads, read)
        matrix = (number * H + head) * (DK * DV) + feature * DV + e
        later = tl.load(laters + matrix, mask=(feature < DK) & has_later, other=0.0)
        state = tl.load(states + matrix, mask=feature < DK, other=0.0)
        held = tl.math.fma(later, state, held)
    pair = pairs + own * (3 * CHUNK) + row[:, None] * CHUNK + row[None, :]
    along, across = tl.load(pair), tl.load(pair + CHUNK * CHUNK)
    between = tl.load(pair + 2 * CHUNK * CHUNK)
    before, seen = row[:, None] > row[None, :], row[:, None] >= row[None, :]
    corrections = tl.where(before, corrections, 0.0)
    by_q = tl.where(seen, by_q * between, 0.0)
    by_k = tl.where(before, corrections * rate[:, None] * between, 0.0)
    place = by + own * (2 * CHUNK) + row[:, None] * CHUNK + row[None, :]
    tl.store(place, by_q)
    tl.store(place + CHUNK * CHUNK, by_k)
    parts = tl.where(before, by_q * across - by_k * along, 0.0)
    shares = corrections * along * between
    # since[s, t] is the sum of parts[s, j] over j < t.
    since = tl.zeros((CHUNK, CHUNK), tl.float32)
    running = tl.zeros((CHUNK,), tl.float32)
    for j in range(count):
        share = pick_row(shares, j, 1)
        of_rate = tl.where(row > j, of_rate - share, of_rate)
        since = tl.where(row[None, :] == j, running[:, None], since)
        running = running + pick_row(parts, j, 1)
    at_start = fade * (asked - rate * read)
    crossing = tl.zeros((CHUNK,), tl.float32)
    sums = tl.zeros((CHUNK,), tl.float32)
    total = tl.full((), -0.0, tl.float32)  # which changes no first term
    for step in range(count):
        s = count - 1 - step
        crossing = tl.where(row <= s, crossing + pick_row(since, s, 0), crossing)
        total = pick_row(at_start, s, 0) + total
        sums = tl.where(row == s, total, sums)
    found = sums + crossing
    # Through the state that is left: g_t is in its decay, and in those of the rows before t.
    whole = tl.full((), 0.0, tl.float32)
    for d in range(DK):
        whole = whole + pick_row(held, d, 0)
    whole = tl.load(decay + own + count - 1) * whole
    left = tl.load(rest + own + row) * taken_new
    added = tl.zeros((CHUNK,), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for t in range(count):
        added = tl.where(row == t, total + whole, added)
        total = total + pick_row(left, t, 0)
    found = tl.where(has_later, found + added, found)
    place = (first + row) * H + head
    tl.store(dg + place, round_once(found, dg.dtype.element_ty), mask=fresh)
    tl.store(dbeta + place, round_once(of_rate, dbeta.dtype.element_ty), mask=fresh)


@triton.jit(do_not_specialize=["tokens"])
def pull_features(
    grad: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    table: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    states: tl.tensor,
    laters: tl.tensor,
    kept: tl.tensor,
    by: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    tokens: tl.tensor,
    KEY_HEADS: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store dq and dk, fp32 [tokens, H, DK], of a chunk's rows and BLOCK features, program_id(2)."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, _, count, _ = read_chunk(table, number)
    has_later = tl.load(table + number * 5 + 4) != 0
    row, feature = tl.arange(0, CHUNK), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside, fresh = feature < DK, row < count
    key_head, size = head // (H // KEY_HEADS), tokens.to(tl.int64) * (H * DV)
    own = (number * H + head) * CHUNK
    asked = tl.zeros((CHUNK, BLOCK), tl.float32)
    wrong = tl.zeros((CHUNK, BLOCK), tl.float32)
    written = tl.zeros((CHUNK, BLOCK), tl.float32)
    for e in range(DV):
        place = ((first + row) * H + head) * DV + e
        new = tl.load(kept + place, mask=fresh, other=0.0)
        dnew = tl.load(kept + 4 * size + place, mask=fresh, other=0.0)
        upstream = tl.load(grad + place, mask=fresh, other=0.0).to(tl.float32)
        matrix = (number * H + head) * (DK * DV) + feature * DV + e
        state = tl.load(states + matrix, mask=inside, other=0.0)
        later = tl.load(laters + matrix, mask=inside & has_later, other=0.0)
        asked = fma_outer(upstream, state, asked)
        wrong = fma_outer(dnew, state, wrong)
        written = fma_outer(new, later, written)
    fade = tl.load(decay + own + row)
    rate = tl.load(beta + (first + row) * H + head, mask=fresh, other=0.0).to(tl.float32)
    of_q = fade[:, None] * asked
    of_k = tl.where(has_later, tl.load(rest + own + row)[:, None] * written, 0.0)
    scale, wrong = tl.broadcast(negative(rate * fade)[:, None], wrong)
    of_k = tl.math.fma(scale, wrong, of_k)
    products = by + own * (2 * CHUNK)
    for j in range(count):
        place = k + ((first + j) * KEY_HEADS + key_head) * DK + feature
        keys = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        by_q = tl.load(products + row * CHUNK + j)
        of_q = tl.where((row >= j)[:, None], fma_outer(by_q, keys, of_q), of_q)
        by_k = products + CHUNK * CHUNK
        both = tl.load(by_k + row * CHUNK + j) + tl.load(by_k + j * CHUNK + row)
        of_k = fma_outer(negative(both), keys, of_k)
    for t in range(count):
        place = q + ((first + t) * KEY_HEADS + key_head) * DK + feature
        queries = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        by_q = tl.load(products + t * CHUNK + row)
        of_k = tl.where((row <= t)[:, None], fma_outer(by_q, queries, of_k), of_k)
    place = ((first + row) * H + head)[:, None] * DK + feature[None, :]
    stored = fresh[:, None] & inside[None, :]
    tl.store(dq + place, of_q, mask=stored)
    tl.store(dk + place, of_k, mask=stored)


@triton.jit(do_not_specialize=["size"])
def add_heads(
    heads: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    REPEATS: tl.constexpr,
    DK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store out [tokens, KEY_HEADS, DK]: the sums of heads fp32 [tokens, KEY_HEADS * REPEATS, DK] from the first."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = heads + at // DK * (REPEATS * DK) + at % DK
    total = tl.load(place, mask=at < size, other=0.0)
    for head in tl.static_range(1, REPEATS):
        total = total + tl.load(place + head * DK, mask=at < size, other=0.0)
    tl.store(out + at, round_once(total, out.dtype.element_ty), mask=at < size)
