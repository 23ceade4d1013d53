"""Attention forward by the plan: online softmax over blocks and chunks of keys. See [Note: plan and kernel]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from isobit.certifying.names.names import Array
from isobit.ops.portable.elementary import soft_cap
from isobit.order.plan import ATTENTION_BLOCK, ATTENTION_CHUNK, Leaf
from tests.certifying.plan.operators import Arithmetic, exp_nonpositive, largest, striped


@dataclass(frozen=True)
class State:
    """The online softmax of queries over some keys: most and total [R, 1], output [R, D]."""

    most: Array
    total: Array
    output: Array

    def where(self, rows: Array, other: State) -> State:
        """Return this state for the given rows [R], and the other one for the rest."""
        pairs = ((self.most, other.most), (self.total, other.total), (self.output, other.output))
        return State(*(np.where(rows[:, None], mine, others) for mine, others in pairs))


@dataclass(frozen=True)
class Seen:
    """The keys that each query sees: those from begin [R] to before end [R]."""

    begin: Array
    end: Array

    def keys(self, first: int, count: int) -> Array:
        """Return [R, count]: whether a query sees each of `count` keys from `first` on."""
        key = first + np.arange(count)
        return np.asarray((key >= self.begin[:, None]) & (key < self.end[:, None]))

    def any(self, first: int, count: int) -> Array:
        """Return [R]: whether a query sees one of them."""
        return np.asarray((first < self.end) & (first + count > self.begin))


def capped(scores: Array, cap: float) -> tuple[Array, Array]:
    """Return scores with a soft cap, and its slope; of values alone, names have no tanh."""
    bent, slope = soft_cap(torch.from_numpy(scores), cap)
    return bent.numpy(), slope.numpy()


@dataclass(frozen=True)
class Head:
    """The queries of one head, q [R, D], against the keys and values of their sample, k and v [T, D].

    Attributes:
        plan: The domain and the arithmetic of products.
        seen: The keys that each query sees.
        scale: What scores are multiplied by.
        chunk: Keys per chunk; another number than that of the order is for tests.
        cap: The soft cap of scores; 0 means none.
    """

    plan: Arithmetic
    q: Array
    k: Array
    v: Array
    seen: Seen
    scale: float
    chunk: int = ATTENTION_CHUNK
    cap: float = 0.0

    def empty(self) -> State:
        """Return the state of no keys."""
        rows, full = len(self.q), self.plan.full
        shape = (rows, self.v.shape[1])
        return State(full((rows, 1), -np.inf), full((rows, 1), 0.0), full(shape, 0.0))

    def finite_or_zero(self, most: Array) -> Array:
        """Return the maximum, or 0 where it is -inf."""
        on = self.plan.on
        return on.choose("eq", most, on.constant(-np.inf), on.constant(0.0), most)

    def block_of(self, rows: Array, first: int) -> Array:
        """Return [64, D], one block of keys or values; what is beyond the last key is +0."""
        on, part = self.plan.on, rows[first : first + ATTENTION_BLOCK]
        zero = on.constant(0.0) if self.plan.dtype == "f32" else on.constant16(0)
        return np.pad(part, ((0, ATTENTION_BLOCK - len(part)), (0, 0)), constant_values=zero)

    def add_block(self, state: State, first: int) -> State:
        """Return the state with the block of keys from `first` on; unchanged where none of them is seen."""
        plan, on = self.plan, self.plan.on
        scores = on.mul(plan.run(self.q, self.block_of(self.k, first)), on.constant(self.scale))
        if self.cap:
            scores, _ = capped(scores, self.cap)
        seen = self.seen.keys(first, ATTENTION_BLOCK)
        scores = np.where(seen, scores, on.constant(-np.inf))
        most = largest(plan, scores, state.most)
        base = self.finite_or_zero(most)
        factor = exp_nonpositive(on, on.sub(state.most, base))
        weights = exp_nonpositive(on, on.sub(scores, base))
        sums = striped(plan, weights, Leaf(0, ATTENTION_BLOCK, False))[:, None]
        products = plan.run(plan.narrow(weights), self.block_of(self.v, first).T)
        total = on.add(on.mul(state.total, factor), sums)
        output = on.add(on.mul(state.output, factor), products)
        return State(most, total, output).where(self.seen.any(first, ATTENTION_BLOCK), state)

    def merged(self, state: State, later: State) -> State:
        """Return the state of both: rescaled to the larger maximum, then added."""
        on = self.plan.on
        most = on.maximum([state.most, later.most])
        base = self.finite_or_zero(most)
        left = exp_nonpositive(on, on.sub(state.most, base))
        right = exp_nonpositive(on, on.sub(later.most, base))
        total = on.add(on.mul(state.total, left), on.mul(later.total, right))
        output = on.add(on.mul(state.output, left), on.mul(later.output, right))
        return State(most, total, output)

    def folded(self) -> State:
        """Return the state over all keys: blocks are folded left in each chunk, and chunks are folded left."""
        keys, whole = len(self.k), self.empty()
        for start in range(0, keys, self.chunk):
            state = self.empty()
            for first in range(start, min(start + self.chunk, keys), ATTENTION_BLOCK):
                state = self.add_block(state, first)
            state = self.merged(whole, state).where(self.seen.begin < start, state)
            whole = state.where(self.seen.any(start, self.chunk), whole)
        return whole

    def attend(self) -> Array:
        """Return y [R, D]: the output divided by the total, and +0 where the total is 0."""
        on, whole = self.plan.on, self.folded()
        zero = on.constant(0.0)
        quotient = on.div(on.add(whole.output, zero), whole.total)
        return self.plan.result(on.choose("eq", whole.total, zero, zero, quotient))
