"""The portable executor of delta_rule: chunks of 64 tokens of a sample, in plain torch operations.

[Note: the order of the delta rule] A sample is cut into chunks of 64 at its own positions, counted from its first
token, wherever a batch or a cache has these. S is the state at a chunk's start and c the sum of g from there: a chain
in fp64, whose differences are rounded to fp32 before exp, since a long sum of strong decays would have no digits left
in fp32. Row t of a chunk reads S and the rows before it:

    new_t = β_t (v_t − e^{c_t} · k_t S) − Σ_{j<t} β_t (k_t·k_j) e^{c_t − c_j} new_j
    o_t = e^{c_t} · q_t S + Σ_{j≤t} (q_t·k_j) e^{c_t − c_j} new_j

and a full chunk leaves S' = e^{c_63} S + Σ_j (e^{c_63 − c_j} k_j) ⊗ new_j. Every sum is one chain of fused
multiply-adds: over features from the first, over rows j from the first, on top of the term that is written before the
sum. So a row needs S and the rows of its chunk (k, new, g) and nothing else: a token that is decoded has the bits of a
prefill, for every cut of a sample into calls. There is no inverse of the chunk's matrix;
docs/decisions/0022-delta-rule.md says why.

Backward goes through the chunks from the last. It recomputes what forward computed, and its sums have the order in
which `backward_of_chunk` writes them; csrc/delta_rule.cpp has the same loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.ops.portable.elementary import exp_nonpositive
from isobit.ops.portable.sums import multiply_add, round_once, widen

CHUNK = 64


@dataclass(frozen=True)
class Sizes:
    """Heads and their sizes: each of the `heads` of v, g and beta reads one of the `key_heads` of q and k."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int

    @property
    def fields(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sample's state, in the order in which they are packed: S, then the open chunk's k, new, g."""
        return (
            (self.heads, self.key_size, self.value_size),
            (self.key_heads, CHUNK, self.key_size),
            (self.heads, CHUNK, self.value_size),
            (self.heads, CHUNK),
        )

    @property
    def packed(self) -> int:
        """The number of elements of a sample's state."""
        return sum(torch.Size(shape).numel() for shape in self.fields)


def sizes_of(q: Tensor, v: Tensor) -> Sizes:
    """Return the sizes of a call from q [..., Hk, Dk] and v [..., H, Dv]."""
    return Sizes(q.shape[-2], v.shape[-2], q.shape[-1], v.shape[-1])


def unpack(packed: Tensor, sizes: Sizes) -> list[Tensor]:
    """Return views of one sample's packed state: S [H, Dk, Dv], k [Hk, 64, Dk], new [H, 64, Dv], g [H, 64]."""
    found, at = [], 0
    for shape in sizes.fields:
        count = torch.Size(shape).numel()
        found.append(packed[at : at + count].view(shape))
        at += count
    return found


@dataclass
class Chunk:
    """The rows of a chunk that are known, of all heads, and the state at its start."""

    state: Tensor  # [H, Dk, Dv]
    keys: Tensor  # [H, n, Dk]
    new: Tensor  # [H, n, Dv]
    logs: Tensor  # [H, n], g

    @property
    def decays(self) -> Tensor:
        """The sums c of g from the chunk's start, [H, n] in fp64."""
        found = self.logs.to(torch.float64, copy=True)
        for row in range(1, found.shape[1]):
            found[:, row] = found[:, row - 1] + found[:, row]
        return found


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Sequence[tuple[int, int]],
    state: Tensor | None,
    counts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return o [..., H, Dv], zeros in rows of no sample, and the state of each sample after its last row.

    Args:
        q: [..., Hk, Dk].
        k: [..., Hk, Dk].
        v: [..., H, Dv].
        g: [..., H], the logarithm of the decay, at most 0.
        beta: [..., H].
        spans: (first row, number of rows) of each sample.
        state: [samples, packed], each sample's state before its first row; None where samples begin here.
        counts: Tokens of each sample before its first row; read where there is a state.
    """
    sizes = sizes_of(q, v)
    rows = heads_first(q, k, v, g, beta)
    o = torch.zeros_like(rows[2])
    after = o.new_empty(0, sizes.packed) if state is None else widen(state).clone()
    for index, (start, length) in enumerate(spans):
        here = [t[:, start : start + length] for t in rows]
        if state is None:
            o[:, start : start + length] = advance(begin(sizes, o), here)[0]
            continue
        packed = unpack(after[index], sizes)
        chunk = read(packed, int(counts[index]) % CHUNK, sizes)
        o[:, start : start + length], last = advance(chunk, here)
        write(packed, last, sizes)
    shaped = round_once(o.transpose(0, 1), v.dtype).reshape(v.shape)
    return shaped, round_once(after, after.dtype)


def heads_first(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v [H, rows, D] and g, beta [H, rows] in the dtype of arithmetic; q and k repeated for each head."""
    repeats = v.shape[-2] // q.shape[-2]
    q, k, v = (widen(t.reshape(-1, *t.shape[-2:])).transpose(0, 1).contiguous() for t in (q, k, v))
    q, k = (t.repeat_interleave(repeats, 0) for t in (q, k))
    g, beta = (widen(t.reshape(-1, t.shape[-1])).t().contiguous() for t in (g, beta))
    return q, k, v, g, beta


def begin(sizes: Sizes, like: Tensor) -> Chunk:
    """Return the chunk of a sample that begins."""
    return Chunk(
        like.new_zeros(sizes.heads, sizes.key_size, sizes.value_size),
        like.new_zeros(sizes.heads, 0, sizes.key_size),
        like.new_zeros(sizes.heads, 0, sizes.value_size),
        like.new_zeros(sizes.heads, 0),
    )


def read(packed: list[Tensor], filled: int, sizes: Sizes) -> Chunk:
    """Return the open chunk of a sample, of which `filled` rows are known."""
    matrix, keys, new, logs = packed
    repeats = sizes.heads // sizes.key_heads
    every = keys[:, :filled].repeat_interleave(repeats, 0)
    return Chunk(matrix.clone(), every, new[:, :filled].clone(), logs[:, :filled].clone())


def write(packed: list[Tensor], chunk: Chunk, sizes: Sizes) -> None:
    """Write the open chunk of a sample; rows that are not known are zeros."""
    matrix, keys, new, logs = packed
    filled, repeats = chunk.new.shape[1], sizes.heads // sizes.key_heads
    matrix.copy_(chunk.state)
    for field, value in ((keys, chunk.keys[::repeats]), (new, chunk.new), (logs, chunk.logs)):
        field.zero_()
        field[:, :filled] = value


def advance(chunk: Chunk, rows: Sequence[Tensor]) -> tuple[Tensor, Chunk]:
    """Return o [H, T, Dv] of the next rows of a sample, and the chunk that is open after them."""
    length, at, found = rows[0].shape[1], 0, [rows[2][:, :0]]
    while at < length:
        count = min(CHUNK - chunk.keys.shape[1], length - at)
        made, chunk = forward_of_chunk(chunk, [t[:, at : at + count] for t in rows])
        found.append(made)
        at += count
        if chunk.keys.shape[1] == CHUNK:
            chunk = close(chunk)
    return torch.cat(found, 1), chunk


def forward_of_chunk(chunk: Chunk, rows: Sequence[Tensor]) -> tuple[Tensor, Chunk]:
    """Return o [H, m, Dv] of m rows that are in one chunk, behind the n that are known, and all n + m rows of it."""
    q, k, v, g, beta = rows
    known, count = chunk.keys.shape[1], k.shape[1]
    logs = torch.cat((chunk.logs, g), 1)
    decays = Chunk(chunk.state, chunk.keys, chunk.new, logs).decays
    keys = torch.cat((chunk.keys, k), 1)
    now = decays[:, known:]
    decay = exp_of_sums(now, g)[..., None]  # [H, m, 1], from the chunk's start
    between = pairwise(now, decays, g)  # [H, m, n + m], from row j to row t
    along = dots(k, keys)
    # Known rows come first: their part of each chain is complete before new rows are.
    new = torch.cat((chunk.new, beta[..., None] * (v - decay * products(k, chunk.state))), 1)
    o = decay * products(q, chunk.state)
    factors = beta[..., None] * along * between
    weights = dots(q, keys) * between
    for j in range(known + count):
        first = max(j + 1, known)  # rows behind j whose value is not complete
        if first < known + count:
            here = -factors[:, first - known :, j, None]
            new[:, first:] = multiply_add(here, new[:, j, None], new[:, first:])
    for j in range(known + count):
        first = max(j, known) - known
        here = weights[:, first:, j, None]
        o[:, first:] = multiply_add(here, new[:, j, None], o[:, first:])
    return o, Chunk(chunk.state, keys, new, logs)


def close(chunk: Chunk) -> Chunk:
    """Return the chunk after this one, which is full, with the state that it leaves."""
    decays = chunk.decays
    last = decays[:, -1:]
    keys = chunk.keys * exp_of_sums(last - decays, chunk.keys)[..., None]
    state = chunk.state * exp_of_sums(last, chunk.keys)[..., None]
    for j in range(keys.shape[1]):
        state = multiply_add(keys[:, j, :, None], chunk.new[:, j, None, :], state)
    return Chunk(state, chunk.keys[:, :0], chunk.new[:, :0], chunk.logs[:, :0])


def exp_of_sums(sums: Tensor, like: Tensor) -> Tensor:
    """Return e^c of sums in fp64, rounded to the dtype of `like` first."""
    return exp_nonpositive(sums.to(like.dtype))


def pairwise(now: Tensor, decays: Tensor, like: Tensor) -> Tensor:
    """Return e^{c_t − c_j} [H, m, n] for rows t against rows j; of rows j behind t, which none reads, 1."""
    return exp_of_sums((now[..., None] - decays[:, None, :]).clamp(max=0.0), like)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Return left · rightᵀ [H, m, n] of rows [H, m, D] and [H, n, D]: chains over D."""
    total = left.new_zeros(*left.shape[:2], right.shape[1])
    for d in range(left.shape[-1]):
        total = multiply_add(left[:, :, d, None], right[:, None, :, d], total)
    return total


def products(left: Tensor, matrix: Tensor) -> Tensor:
    """Return left · matrix [H, m, Dv] of rows [H, m, Dk] and a matrix [H, Dk, Dv]: chains over Dk."""
    total = left.new_zeros(*left.shape[:2], matrix.shape[-1])
    for d in range(left.shape[-1]):
        total = multiply_add(left[:, :, d, None], matrix[:, None, d], total)
    return total


def row_dots(left: Tensor, right: Tensor) -> Tensor:
    """Return [H, m], the dots of rows of left and right [H, m, D]: chains over D."""
    total = left.new_zeros(left.shape[:-1])
    for d in range(left.shape[-1]):
        total = multiply_add(left[..., d], right[..., d], total)
    return total


# ---- backward ---------------------------------------------------------------------------------------------------


def delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    spans: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and beta; samples begin here."""
    sizes = sizes_of(q, v)
    rows = heads_first(q, k, v, g, beta)
    upstream = widen(grad.reshape(-1, *grad.shape[-2:])).transpose(0, 1).contiguous()
    made = [torch.zeros_like(t) for t in rows]
    for start, length in spans:
        chunk, opened = begin(sizes, upstream), []
        edges = [
            slice(start + at, start + min(at + CHUNK, length)) for at in range(0, length, CHUNK)
        ]
        for here in edges:
            _, known = forward_of_chunk(chunk, [t[:, here] for t in rows])
            opened.append(known)
            chunk = close(known) if known.keys.shape[1] == CHUNK else known
        later = None
        for here, known in zip(reversed(edges), reversed(opened), strict=True):
            found, later = backward_of_chunk(
                known, [t[:, here] for t in rows], upstream[:, here], later
            )
            for whole, part in zip(made, found, strict=True):
                whole[:, here] = part
    dq, dk, dv, dg, dbeta = made
    dq, dk = (sum_groups(t, sizes).transpose(0, 1) for t in (dq, dk))
    shaped = (dq, dk, dv.transpose(0, 1), dg.t(), dbeta.t())
    return tuple(  # type: ignore[return-value]
        round_once(t, like.dtype).reshape(like.shape)
        for t, like in zip(shaped, (q, k, v, g, beta), strict=True)
    )


def sum_groups(grads: Tensor, sizes: Sizes) -> Tensor:
    """Return [Hk, rows, D]: the sums over the heads that read one head of keys, from the first."""
    groups = grads.view(sizes.key_heads, -1, *grads.shape[1:])
    total = groups[:, 0]
    for head in range(1, groups.shape[1]):
        total = total + groups[:, head]
    return total


def backward_of_chunk(
    chunk: Chunk, rows: Sequence[Tensor], upstream: Tensor, later: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradients of a chunk's rows, and of the state at its start.

    Args:
        chunk: All its rows, and the state at its start.
        rows: q, k, v, g, beta.
        upstream: The gradient of o, [H, m, Dv].
        later: The gradient of the state that it leaves, [H, Dk, Dv]; None where no later chunk reads it.
    """
    q, k, v, _, beta = rows
    state, new, decays, count = chunk.state, chunk.new, chunk.decays, q.shape[1]
    decay, between = exp_of_sums(decays, q), pairwise(decays, decays, q)
    along, across = dots(k, k), dots(q, k)
    weights, factors = across * between, beta[..., None] * along * between
    reads, asks = products(k, state), products(q, state)

    # The gradient of new, from the last row: through o, through later rows, and through the state that is left.
    dnew, left = torch.zeros_like(new), torch.zeros_like(beta)
    if later is not None:
        remaining = exp_of_sums(decays[:, -1:] - decays, q)
        taken = products(k, later)
        dnew = remaining[..., None] * taken
        left = remaining * row_dots(taken, new)
    for t in reversed(range(count)):
        here = weights[:, t, : t + 1, None]
        dnew[:, : t + 1] = multiply_add(here, upstream[:, t, None], dnew[:, : t + 1])
        if t:
            here = -factors[:, t, :t, None]
            dnew[:, :t] = multiply_add(here, dnew[:, t, None], dnew[:, :t])

    # Products of rows: by_q is the gradient of q_t·k_j, by_k that of −k_t·k_j; both are zero behind the diagonal.
    seen = torch.ones(count, count, dtype=torch.bool, device="cpu").tril()
    before = seen.tril(-1)
    corrections = torch.where(before, dots(dnew, new), 0.0)
    by_q = torch.where(seen, dots(upstream, new) * between, 0.0)
    by_k = torch.where(before, corrections * beta[..., None] * between, 0.0)
    pairs = torch.where(before, by_q * across - by_k * along, 0.0)

    dv = beta[..., None] * dnew
    dbeta = row_dots(dnew, v - decay[..., None] * reads)
    shares = corrections * along * between
    dq = decay[..., None] * products(upstream, state.transpose(1, 2))
    dk = torch.zeros_like(k)
    if later is not None:
        dk = remaining[..., None] * products(new, later.transpose(1, 2))
    scale = -(beta * decay)[..., None]
    dk = multiply_add(scale, products(dnew, state.transpose(1, 2)), dk)
    both = by_k + by_k.transpose(1, 2)
    at_start = decay * (row_dots(upstream, asks) - beta * row_dots(dnew, reads))
    for j in range(count):
        dbeta[:, j + 1 :] = dbeta[:, j + 1 :] - shares[:, j + 1 :, j]
        dq[:, j:] = multiply_add(by_q[:, j:, j, None], k[:, j, None], dq[:, j:])
        dk = multiply_add(-both[:, :, j, None], k[:, j, None], dk)
    for t in range(count):
        dk[:, : t + 1] = multiply_add(by_q[:, t, : t + 1, None], q[:, t, None], dk[:, : t + 1])
    dg = backward_of_decays(at_start, pairs)
    if later is not None:
        held = row_dots(later, state)  # [H, Dk]
        whole = torch.zeros_like(held[:, 0])
        for d in range(held.shape[1]):
            whole = whole + held[:, d]
        whole = decay[:, -1] * whole
        total = torch.zeros_like(whole)
        for t in range(count):
            dg[:, t] = dg[:, t] + (total + whole)
            total = total + left[:, t]

    earlier = torch.zeros_like(state)
    if later is not None:
        earlier = decay[:, -1, None, None] * later
    sent, wrong = decay[..., None] * upstream, scale * dnew
    for t in range(count):
        earlier = multiply_add(q[:, t, :, None], sent[:, t, None, :], earlier)
        earlier = multiply_add(k[:, t, :, None], wrong[:, t, None, :], earlier)
    return (dq, dk, dv, dg, dbeta), earlier


def backward_of_decays(at_start: Tensor, pairs: Tensor) -> Tensor:
    """Return dg [H, m] of the terms with e^{c_t}, whose derivatives are `at_start`, and with e^{c_s − c_j}, `pairs`.

    g_t is in c_s for s ≥ t and in c_s − c_j for s ≥ t > j. Only these are added: sums of dc would have to cancel the
    others.
    """
    count = at_start.shape[1]
    dg, across, since = at_start.clone(), torch.zeros_like(at_start), torch.zeros_like(pairs)
    for t in range(1, count):
        since[..., t] = since[..., t - 1] + pairs[..., t - 1]  # [H, s, t]: the sum over j < t
    for s in reversed(range(count)):
        across[:, : s + 1] = across[:, : s + 1] + since[:, s, : s + 1]
    for t in reversed(range(count - 1)):
        dg[:, t] = at_start[:, t] + dg[:, t + 1]
    return dg + across
