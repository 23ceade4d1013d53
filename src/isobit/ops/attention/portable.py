"""The portable executor of attention: online softmax over blocks of 64 keys, in plain torch operations.

[Note: chunks of keys]
The state of a query is (max, sum, output): the largest score, the sum of the weights exp(score - max), and the sum of
the weights times the values. No keys have the state (-inf, 0, 0).

- Keys are cut into chunks of 2048, at positions 0, 2048, 4096, ... of the sample, and a chunk into blocks of 64.
- A chunk folds its blocks left, starting from the state of no keys (`Fold.add`).
- The states of the chunks are folded left (`State.merged`). A sample of up to 2048 keys has one chunk and no merge.

A merge changes nothing if one of the two has the state of no keys: its factor is exp(-inf) = 0 and the other's is
exp(0) = 1, so what is added is +0. Hence an executor may skip a chunk of which a query sees no key, or compute it, and
chunks may be computed apart from each other (split-KV decoding) and merged from left to right later. Infinities and
NaN need no rule of their own. A score of +inf makes the maximum +inf and all sums NaN, which a merge keeps. A score
that is NaN does not enter the maximum, but its weight is NaN and so are the sums. Two exceptions to "nothing" cannot
be seen: -0 becomes +0 when +0 is added, and `Fold.finish` adds +0 in any case; a NaN stays a NaN, and results have one
NaN.

The backward has no chunks: dq folds blocks of keys left, dk and dv fold blocks of queries left. It reads the
log-sum-exp of the whole row, so each block's contribution is final and needs no rescaling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, wide_values
from isobit.ops.portable.elementary import exp_nonpositive, log_positive, soft_cap
from isobit.ops.portable.sums import multiply_add, round_once, sum_last, sum_leaf, sum_rows
from isobit.ops.share import accumulation_dtype
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK, Leaf


@dataclass(frozen=True)
class Mask:
    """The scale of the scores, their soft cap, and which keys a query sees; a cap, window or size of 0 means none.

    A window has `window` keys with the query's own as the last; without `causal`, also as many after it. With
    `chunk_size`, a query sees only keys of its own piece of so many positions, from the start of the sample.
    """

    scale: float
    causal: bool
    window: int
    softcap: float = 0.0
    chunk_size: int = 0

    @property
    def options(self) -> tuple[float, bool, int, float, int]:
        """The last arguments of the operators."""
        return self.scale, self.causal, self.window, self.softcap, self.chunk_size

    def seen(self, positions: Tensor, first: int, count: int, keys: int) -> Tensor:
        """Return [queries, count]: whether a query sees each of `count` keys from position `first` on."""
        begin, end = torch.zeros_like(positions), torch.full_like(positions, keys)
        if self.causal:
            end = positions + 1
        elif self.window:
            end = (positions + self.window).clamp(max=keys)
        if self.window:
            begin = (positions + 1 - self.window).clamp(min=0)
        if self.chunk_size:
            begin = torch.maximum(begin, positions // self.chunk_size * self.chunk_size)
        place = torch.arange(first, first + count)
        return (place >= begin[:, None]) & (place < end[:, None])

    def scaled(self, scores: Tensor) -> Tensor:
        """Multiply scores by the scale, rounded to the dtype of the scores."""
        return scores * torch.tensor(self.scale, dtype=scores.dtype)

    def scored(self, products: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of products of queries and keys, and their derivative by the scaled product (None: 1)."""
        scaled = self.scaled(products)
        return soft_cap(scaled, self.softcap) if self.softcap else (scaled, None)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return [R, C], left [R, k] against right [C, k], as one chain per entry."""
    return sum_leaf(Leaf(0, left.shape[1], False), left, right)


def attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, blocks: Tensor, lengths: Tensor, mask: Mask
) -> tuple[Tensor, Tensor]:
    """Return y in the dtype of q, and the log-sum-exp of each query's scores."""
    wide = accumulation_dtype(q.dtype)
    y, lse = (
        torch.zeros_like(q, dtype=wide).contiguous(),
        torch.full(q.shape[:2], torch.inf, dtype=wide),
    )
    group = q.shape[1] // k.shape[1]
    for (start, rows), starts, keys in zip(
        spans.tolist(), blocks.tolist(), lengths.tolist(), strict=True
    ):
        positions = torch.arange(rows) + (keys - rows)
        for head in range(q.shape[1] if rows else 0):
            fold = Fold(q[start : start + rows, head].to(wide), positions, keys, mask)
            for first in range(0, keys, ATTENTION_BLOCK):
                row = starts[first // ATTENTION_BLOCK]
                at = slice(row, row + min(ATTENTION_BLOCK, keys - first))
                fold.add(first, k[at, head // group].to(wide), v[at, head // group].to(wide))
            y[start : start + rows, head], lse[start : start + rows, head] = fold.finish()
    return round_once(y, q.dtype), lse.float()


@dataclass(frozen=True)
class State:
    """The online softmax of queries over some keys: max and sum [queries, 1], output [queries, D]."""

    max: Tensor
    sum: Tensor
    output: Tensor

    @staticmethod
    def empty(q: Tensor) -> State:
        """Return the state of no keys."""
        column = q.new_zeros(len(q), 1)
        return State(torch.full_like(column, -torch.inf), column, torch.zeros_like(q))

    def merged(self, later: State) -> State:
        """Return the state of both, with this one as the left operand: rescale to the larger maximum, then add."""
        most = torch.maximum(self.max, later.max)
        base = torch.where(most == -torch.inf, 0.0, most)
        left, right = exp_nonpositive(self.max - base), exp_nonpositive(later.max - base)
        total = self.sum * left + later.sum * right
        return State(most, total, self.output * left + later.output * right)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return y, in which zero is always +0, and the log-sum-exp."""
        none = self.sum == 0
        y = torch.where(none, 0.0, (self.output + 0.0) / self.sum)
        log = log_positive(torch.where(none, 1.0, self.sum))
        return y, torch.where(none, torch.inf, self.max + log).squeeze(1)


class Fold:
    """The states of queries over the keys added so far: the chunks that are complete, and the last chunk."""

    def __init__(self, q: Tensor, positions: Tensor, keys: int, mask: Mask) -> None:
        self._q, self._positions, self._keys, self._mask = q, positions, keys, mask
        self._earlier: State | None = None
        self._chunk = State.empty(q)

    def add(self, first: int, k: Tensor, v: Tensor) -> None:
        """Add one block of keys and values, the first at position `first`; blocks are added in order."""
        if self.begins_chunk(first):
            self._earlier, self._chunk = self.state, State.empty(self._q)
        seen = self._mask.seen(self._positions, first, len(k), self._keys)
        scores = torch.where(seen, self._mask.scored(product(self._q, k))[0], -torch.inf)
        known = torch.where(scores.isnan(), -torch.inf, scores)
        before = self._chunk
        most = torch.maximum(before.max, known.amax(1, keepdim=True))
        base = torch.where(most == -torch.inf, 0.0, most)
        factor, weights = exp_nonpositive(before.max - base), exp_nonpositive(scores - base)
        added = sum_rows(((Leaf(0, len(k), False),),), weights.t())[0].unsqueeze(1)
        total = torch.zeros_like(before.output)
        # A key that is not seen adds nothing, whatever its value: 0 · inf would be NaN.
        for key in range(len(k)):
            longer = multiply_add(weights[:, key, None], v[key], total)
            total = torch.where(seen[:, key, None], longer, total)
        output = before.output * factor + total
        self._chunk = State(most, before.sum * factor + added, output)

    def begins_chunk(self, first: int) -> bool:
        """Return whether the block at position `first` begins a chunk after the first one."""
        return first > 0 and first % ATTENTION_CHUNK == 0

    def merge(self, earlier: State, chunk: State) -> State:
        """Return the state of some chunks and the next one."""
        return earlier.merged(chunk)

    @property
    def state(self) -> State:
        """The state over all keys added so far."""
        return self._chunk if self._earlier is None else self.merge(self._earlier, self._chunk)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return y and the log-sum-exp, over all keys added so far."""
        return self.state.finish()


@dataclass(frozen=True)
class Saved:
    """The tensors that the gradient is computed from: rows [R, H, D], and lse [R, H]."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def attention_backward(saved: Saved, spans: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtype of the inputs; every sample has as many queries as keys."""
    wide = accumulation_dtype(saved.q.dtype)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide).contiguous() for t in (saved.q, saved.k, saved.v))
    group = saved.q.shape[1] // saved.k.shape[1]
    for start, rows in spans.tolist():
        cuts = [
            slice(start + at, start + min(at + ATTENTION_BLOCK, rows))
            for at in range(0, rows, ATTENTION_BLOCK)
        ]
        for head in range(saved.q.shape[1]):
            for queries in cuts:
                for keys in cuts:
                    pair = Pair(saved, mask, head, head // group, queries, keys, start, rows, wide)
                    dv[keys, head // group] += product(pair.weights.t(), pair.grad.t())
                    dk[keys, head // group] += product(pair.score_grads.t(), pair.q.t())
                    dq[queries, head] += product(pair.score_grads, pair.k.t())
    dtype = saved.q.dtype
    return round_once(dq + 0.0, dtype), round_once(dk + 0.0, dtype), round_once(dv + 0.0, dtype)


class Pair:
    """A block of queries against a block of keys: the recomputed weights, and the gradient of the scores."""

    def __init__(
        self,
        saved: Saved,
        mask: Mask,
        head: int,
        key_head: int,
        queries: slice,
        keys: slice,
        start: int,
        rows: int,
        wide: torch.dtype,
    ) -> None:
        self.q, self.grad = saved.q[queries, head].to(wide), saved.grad[queries, head].to(wide)
        self.k, v = saved.k[keys, key_head].to(wide), saved.v[keys, key_head].to(wide)
        positions = torch.arange(queries.start - start, queries.stop - start)
        seen = mask.seen(positions, keys.start - start, len(self.k), rows)
        lse = saved.lse[queries, head].to(wide).unsqueeze(1)
        scores, slope = mask.scored(product(self.q, self.k))
        self.weights = torch.where(seen, exp_nonpositive(scores - lse), 0.0)
        dots = sum_last(self.grad * saved.out[queries, head].to(wide))
        spread = self.weights * (product(self.grad, v) - dots)
        spread = mask.scaled(spread if slope is None else spread * slope)
        self.score_grads = torch.where(seen, spread, 0.0)


# Compare an executor's attention with the portable one, bit for bit, across the edges of a block and of a chunk.

KEYS, DEPTH = 66, 16  # a whole block and a part of the next
# Two queries that see the end of a chunk, a whole block of the next, and a part of another.
QUERIES, END, WINDOW = 2, ATTENTION_CHUNK + KEYS, 2 * KEYS


def difference(dtype: torch.dtype, call: Call = call_native) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(KEYS)
    q, k, v, grad = (wide_values((KEYS, 1, DEPTH), dtype, generator) for _ in range(4))
    spans, blocks, lengths = (
        torch.tensor([[0, KEYS]]),
        torch.tensor([[0, 64]]),
        torch.tensor([KEYS]),
    )
    where = spans, blocks, lengths
    for mask in (Mask(0.25, True, 0), Mask(0.25, False, 40, 1.7), Mask(0.25, True, 0, 0.0, 24)):
        y, lse = call("attention", q, k, v, *where, *mask.options)
        found = call("attention_backward", grad, q, k, v, y, lse, *where, *mask.options)
        known = attention_backward(Saved(grad, q, k, v, y, lse), spans, mask)
        pairs = [(y, attention(q, k, v, *where, mask)[0]), *zip(found, known, strict=True)]
        for name, (left, right) in zip(("outputs", "dq", "dk", "dv"), pairs, strict=True):
            if not bits.equal(left, right):
                return f"attention's {name}, {mask}"
    return difference_across_chunks(generator, call)


def difference_across_chunks(generator: torch.Generator, call: Call) -> str | None:
    """Return what differs first where a window is cut by the edge of a chunk, or None.

    The keys before the window are NaN. Only blocks that a query sees are computed here, so that this takes little time;
    the contract has whole chunks.
    """
    mask = Mask(0.25, True, WINDOW)
    q, k, v = (
        torch.randn((rows, 1, DEPTH), generator=generator, dtype=torch.float32)
        for rows in (QUERIES, END, END)
    )
    first = END - QUERIES + 1 - WINDOW  # the first key that is seen
    k[:first] = v[:first] = torch.nan
    starts = range(0, END, ATTENTION_BLOCK)
    found, found_lse = call(
        "attention",
        q,
        k,
        v,
        torch.tensor([[0, QUERIES]]),
        torch.tensor([list(starts)]),
        torch.tensor([END]),
        mask.scale,
        mask.causal,
        mask.window,
    )
    fold = Fold(q[:, 0], torch.arange(END - QUERIES, END), END, mask)
    for at in starts[first // ATTENTION_BLOCK :]:
        fold.add(at, k[at : at + ATTENTION_BLOCK, 0], v[at : at + ATTENTION_BLOCK, 0])
    y, lse = fold.finish()
    if not bits.equal(found[:, 0], y) or not bits.equal(found_lse[:, 0], lse):
        return "attention's outputs across a chunk's edge"
    return None
