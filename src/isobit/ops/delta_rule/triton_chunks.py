"""Kernels of the delta rule, forward: chunks of 64 rows in the order of the portable executor.

[Note: the delta rule on a GPU]
`relate_rows` computes what the rows of a chunk are to each other, for all chunks and heads at once: decays, and the
products of keys and queries. `advance_chunks` goes through the chunks of a sample: a program has one head and BLOCK
columns of the values, which no sum mixes. A row's value is complete when all rows before it are, so row j is taken from
the tile (`pick_row`) once they are, and its term is added to all later rows, to the outputs and to the next state.
Every chain has the ascending order of the portable executor's; loads of rows that a chunk does not have are +0 and
reach no stored result.

q and k are [tokens, KEY_HEADS, DK], v, o and `new` [tokens, H, DV], g (fp32) and beta [tokens, H], all contiguous.
`table` is int64 [chunks, 5]: the token of the first row that is not known, the number of rows that are known from the
state, of all rows, the sample, and whether a later chunk of it follows. `bounds` is int64 [samples + 1]: the first
chunk of each sample. `state` is fp32 [samples, PACKED]; see `Sizes.fields`. `pairs` is fp32 [chunks, H, 3, 64, 64]:
k_t·k_j, q_t·k_j and e^{c_t − c_j}. `decay` and `rest` are fp32 [chunks, H, 64]: e^{c_t}, and e^{c_last − c_t}.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isobit.ops.gpu.elementary import exp_nonpositive, round_once

CHUNK = tl.constexpr(64)
LOWEST = tl.constexpr(-(2**31))


@triton.jit
def negative(x: tl.tensor) -> tl.tensor:
    """Return −x, also of zeros: Triton's -x is 0 − x, which is +0 for +0."""
    return x * -1.0


@triton.jit
def fma_outer(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return total [M, N] + a [M] ⊗ b [N], fused."""
    left, right = tl.broadcast(a[:, None], b[None, :])
    return tl.math.fma(left, right, total)


@triton.jit
def pick_row(tile: tl.tensor, at: tl.tensor, AXIS: tl.constexpr) -> tl.tensor:
    """Return the row (AXIS 0) or the column (AXIS 1) `at` of a tile, or an element of a vector: a maximum of bits."""
    number = tl.arange(0, tile.shape[AXIS])
    if len(tile.shape) == 2:
        number = number[:, None] if AXIS == 0 else number[None, :]
    bits = tl.where(number == at, tile.to(tl.int32, bitcast=True), LOWEST)
    return tl.max(bits, AXIS).to(tl.float32, bitcast=True)


@triton.jit
def read_chunk(
    table: tl.tensor, chunk: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first token, the numbers of known rows and of all rows, and the sample of a chunk."""
    place = table + chunk * 5
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)


@triton.jit
def load_keys(
    k: tl.tensor,
    state: tl.tensor,
    chunk: tl.tuple,
    row: tl.tensor,
    feature: tl.tensor,
    inside: tl.tensor,
    key_head: tl.tensor,
    KEY_HEADS: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Return keys of rows of a chunk: of the call, or of the state where they are known."""
    first, known, count, sample = chunk
    fresh = inside & (row >= known) & (row < count)
    place = ((first + row - known) * KEY_HEADS + key_head) * DK + feature
    value = tl.load(k + place, mask=fresh, other=0.0).to(tl.float32)
    if PACKED:
        held = inside & (row < known)
        place = sample * PACKED + H * DK * DV + (key_head * CHUNK + row) * DK + feature
        value = tl.where(held, tl.load(state + place, mask=held, other=0.0), value)
    return value


@triton.jit
def load_log(
    g: tl.tensor,
    state: tl.tensor,
    chunk: tl.tuple,
    row: tl.tensor,
    head: tl.tensor,
    LOGS: tl.constexpr,
    H: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tensor:
    """Return g of rows of a chunk."""
    first, known, count, sample = chunk
    fresh = (row >= known) & (row < count)
    value = tl.load(g + (first + row - known) * H + head, mask=fresh, other=0.0).to(tl.float32)
    if PACKED:
        place = state + sample * PACKED + LOGS + head * CHUNK + row
        value = tl.where(row < known, tl.load(place, mask=row < known, other=0.0), value)
    return value


@triton.jit
def relate_rows(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    state: tl.tensor,
    table: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    pairs: tl.tensor,
    KEY_HEADS: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Store the decays and products of the rows of a chunk; program_id(1) is the head. Sums of g are in fp64."""
    LOGS: tl.constexpr = PACKED - H * CHUNK
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = read_chunk(table, number)
    first, known, count, _ = chunk
    row, key_head = tl.arange(0, CHUNK), head // (H // KEY_HEADS)
    total = tl.full((), -0.0, tl.float64)  # which changes no first term
    sums = tl.zeros((CHUNK,), tl.float64)
    for at in range(count):
        total = total + load_log(g, state, chunk, at, head, LOGS, H, PACKED).to(tl.float64)
        sums = tl.where(row == at, total, sums)
    own = (number * H + head) * CHUNK + row
    tl.store(decay + own, exp_nonpositive(sums.to(tl.float32)))
    tl.store(rest + own, exp_nonpositive((total - sums).to(tl.float32)))
    apart = sums[:, None] - sums[None, :]
    apart = tl.where(apart > 0.0, 0.0, apart)  # of rows behind, which none reads
    place = pairs + (number * H + head) * (3 * CHUNK * CHUNK)
    place = place + row[:, None] * CHUNK + row[None, :]
    tl.store(place + 2 * CHUNK * CHUNK, exp_nonpositive(apart.to(tl.float32)))
    along = tl.zeros((CHUNK, CHUNK), tl.float32)
    across = tl.zeros((CHUNK, CHUNK), tl.float32)
    fresh = (row >= known) & (row < count)
    for d in range(DK):
        keys = load_keys(
            k, state, chunk, row, d, row < count, key_head, KEY_HEADS, H, DK, DV, PACKED
        )
        own_row = ((first + row - known) * KEY_HEADS + key_head) * DK + d
        queries = tl.load(q + own_row, mask=fresh, other=0.0).to(tl.float32)
        along = fma_outer(keys, keys, along)
        across = fma_outer(queries, keys, across)
    tl.store(place, along)
    tl.store(place + CHUNK * CHUNK, across)


@triton.jit(do_not_specialize=["tokens"])
def advance_chunks(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    state: tl.tensor,
    table: tl.tensor,
    bounds: tl.tensor,
    decay: tl.tensor,
    rest: tl.tensor,
    pairs: tl.tensor,
    after: tl.tensor,
    o: tl.tensor,
    kept: tl.tensor,
    tokens: tl.tensor,
    KEY_HEADS: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PACKED: tl.constexpr,
    KEEP: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the outputs of a sample, program_id(0), and the state after it.

    after is fp32 [samples, PACKED or H * DK * DV]. If KEEP it is [chunks, H * DK * DV], and has the state at the start
    of each chunk; then o is not stored, and kept is fp32 [3, tokens, H, DV]: new values, k S and q S. WIDE is the power
    of two that is not below DK.
    """
    NEWS: tl.constexpr = H * DK * DV + KEY_HEADS * CHUNK * DK
    LOGS: tl.constexpr = PACKED - H * CHUNK
    STRIDE: tl.constexpr = PACKED if PACKED else H * DK * DV
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DV
    row, feature = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    key_head = head // (H // KEY_HEADS)
    begin, end = tl.load(bounds + number), tl.load(bounds + number + 1)
    for at in range(begin, end):
        chunk = read_chunk(table, at)
        first, known, count, sample = chunk
        fresh = (row >= known) & (row < count)
        token = first + row - known
        matrix = after + (at if KEEP else number) * STRIDE + head * (DK * DV)
        reads = tl.zeros((CHUNK, BLOCK), tl.float32)
        asks = tl.zeros((CHUNK, BLOCK), tl.float32)
        for d in range(DK):
            values = tl.load(matrix + d * DV + column, mask=inside, other=0.0)
            place = (token * KEY_HEADS + key_head) * DK + d
            keys = tl.load(k + place, mask=fresh, other=0.0).to(tl.float32)
            queries = tl.load(q + place, mask=fresh, other=0.0).to(tl.float32)
            reads = fma_outer(keys, values, reads)
            asks = fma_outer(queries, values, asks)
        own = (at * H + head) * CHUNK
        fade = tl.load(decay + own + row)[:, None]
        rate = tl.load(beta + token * H + head, mask=fresh, other=0.0).to(tl.float32)
        place = (token * H + head)[:, None] * DV + column[None, :]
        stored = fresh[:, None] & inside[None, :]
        given = tl.load(v + place, mask=stored, other=0.0).to(tl.float32)
        new = rate[:, None] * (given - fade * reads)
        open_place = sample * PACKED + NEWS + (head * CHUNK + row)[:, None] * DV + column[None, :]
        if PACKED:
            held = (row < known)[:, None] & inside[None, :]
            new = tl.where(held, tl.load(state + open_place, mask=held, other=0.0), new)
        out = fade * asks
        own_matrix = matrix + feature[:, None] * DV + column[None, :]
        in_matrix = (feature < DK)[:, None] & inside[None, :]
        left = tl.load(own_matrix, mask=in_matrix, other=0.0) * tl.load(decay + own + CHUNK - 1)
        for j in range(count):
            made = pick_row(new, j, 0)  # [BLOCK]; rows before j are in it
            pair = pairs + own * (3 * CHUNK) + row * CHUNK + j
            between = tl.load(pair + 2 * CHUNK * CHUNK)
            factor = rate * tl.load(pair) * between
            later = ((row > j) & fresh)[:, None]
            new = tl.where(later, fma_outer(negative(factor), made, new), new)
            weight = tl.load(pair + CHUNK * CHUNK) * between
            out = tl.where((row >= j)[:, None], fma_outer(weight, made, out), out)
            keys = load_keys(
                k, state, chunk, j, feature, feature < DK, key_head, KEY_HEADS, H, DK, DV, PACKED
            )
            left = fma_outer(keys * tl.load(rest + own + j), made, left)
        if KEEP:
            tl.store(kept + place, new, mask=stored)
            size = tokens.to(tl.int64) * (H * DV)
            tl.store(kept + size + place, reads, mask=stored)
            tl.store(kept + 2 * size + place, asks, mask=stored)
        else:
            tl.store(o + place, round_once(out, o.dtype.element_ty), mask=stored)
        is_full = count == CHUNK
        tl.debug_barrier()  # other warps may still read what is replaced
        if KEEP:
            if at + 1 < end:
                tl.store(own_matrix + STRIDE, left, mask=in_matrix)
        else:
            tl.store(own_matrix, round_once(left, tl.float32), mask=in_matrix & is_full)
        tl.debug_barrier()  # other warps read what was stored
        if PACKED and at + 1 == end:
            # The open chunk: none of a full one is left, and rows that are not known are zeros.
            filled = tl.where(is_full, 0, count)
            new = tl.where((row < filled)[:, None], new, 0.0)
            tl.store(after + open_place, round_once(new, tl.float32), mask=inside[None, :])
            if tl.program_id(2) == 0:
                logs = load_log(g, state, chunk, row, head, LOGS, H, PACKED)
                logs = round_once(tl.where(row < filled, logs, 0.0), tl.float32)
                tl.store(after + sample * PACKED + LOGS + head * CHUNK + row, logs)
                if head % (H // KEY_HEADS) == 0:
                    features = feature[None, :] + row[:, None] * 0
                    held_keys = load_keys(
                        k, state, chunk, row[:, None], features, features < DK, key_head, KEY_HEADS,
                        H, DK, DV, PACKED,
                    )  # fmt: skip
                    held_keys = tl.where((row < filled)[:, None], held_keys, 0.0)
                    into = sample * PACKED + H * DK * DV + (key_head * CHUNK + row)[:, None] * DK
                    held_keys = round_once(held_keys, tl.float32)
                    tl.store(after + into + features, held_keys, mask=features < DK)
