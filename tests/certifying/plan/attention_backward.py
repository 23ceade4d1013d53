"""Attention backward by the plan: blocks of 64 keys for dq, of 64 queries for dk and dv, folded left.

See [Note: plan and kernel]. Queries and keys of a sample are as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isobit.certifying.names.names import Array
from isobit.order.plan import ATTENTION_BLOCK
from tests.certifying.plan.attention import Seen, capped
from tests.certifying.plan.operators import Arithmetic, exp_nonpositive, sum_last


@dataclass(frozen=True)
class HeadGrads:
    """The gradient of one query head: grad, q, k, v and y are [T, D], lse [T] is fp32.

    Attributes:
        plan: The domain and the arithmetic of products.
        seen: The keys that each query sees.
        scale: What scores are multiplied by.
        cap: The soft cap of scores; 0 means none.
    """

    plan: Arithmetic
    grad: Array
    q: Array
    k: Array
    v: Array
    y: Array
    lse: Array
    seen: Seen
    scale: float
    cap: float = 0.0

    @property
    def blocks(self) -> Iterator[slice]:
        """The blocks of the sample."""
        for first in range(0, len(self.q), ATTENTION_BLOCK):
            yield slice(first, min(first + ATTENTION_BLOCK, len(self.q)))

    def meet(self, queries: slice, keys: slice) -> bool:
        """Return whether a query of one block may see a key of the other: all before and in its range."""
        begin, end = self.seen.begin[queries], self.seen.end[queries]
        first = int(begin[0]) // ATTENTION_BLOCK * ATTENTION_BLOCK
        return bool(first <= keys.start < int(end[-1]))

    def pair(self, queries: slice, keys: slice) -> tuple[Array, Array]:
        """Return [queries, keys], the weights and the gradient of the scores, as elements; +0 where not seen."""
        plan, on = self.plan, self.plan.on
        scale, zero = on.constant(self.scale), on.constant(0.0)
        scores = on.mul(plan.run(self.q[queries], self.k[keys]), scale)
        slope = None
        if self.cap:
            scores, slope = capped(scores, self.cap)
        seen = self.seen.keys(keys.start, keys.stop - keys.start)[queries]
        weights = exp_nonpositive(on, on.sub(scores, self.lse[queries, None]))
        weights = np.where(seen, weights, zero)
        products = on.mul(plan.widen(self.grad[queries]), plan.widen(self.y[queries]))
        dots = sum_last(plan, products)
        centred = on.sub(plan.run(self.grad[queries], self.v[keys]), dots)
        spread = on.mul(weights, centred)
        if slope is not None:
            spread = on.mul(spread, slope)
        spread = np.where(seen, on.mul(spread, scale), zero)
        return plan.narrow(weights), plan.narrow(spread)

    def pad(self, factors: Array) -> Array:
        """Return factors [R, k] padded with +0 to a block: kernels multiply whole blocks."""
        zero = (
            self.plan.on.constant(0.0) if self.plan.dtype == "f32" else self.plan.on.constant16(0)
        )
        widths = ((0, 0), (0, ATTENTION_BLOCK - factors.shape[1]))
        return np.pad(factors, widths, constant_values=zero)

    def product(self, left: Array, right: Array) -> Array:
        """Return [R, C], left [R, k] against right [C, k] over one block."""
        return self.plan.run(self.pad(left), self.pad(right))

    def query_grads(self) -> Array:
        """Return the sums of dq [T, D], in fp32."""
        on = self.plan.on
        out = self.plan.full(self.q.shape, 0.0)
        for queries in self.blocks:
            for keys in self.blocks:
                if self.meet(queries, keys):
                    added = self.product(self.pair(queries, keys)[1], self.k[keys].T)
                    out[queries] = on.add(out[queries], added)
        return out

    def add_key_grads(self, dk: Array, dv: Array) -> tuple[Array, Array]:
        """Return dk and dv [T, D] with the sums of this head added, in fp32."""
        on, dk, dv = self.plan.on, dk.copy(), dv.copy()
        for queries in self.blocks:
            for keys in self.blocks:
                if self.meet(queries, keys):
                    weights, spread = self.pair(queries, keys)
                    dv[keys] = on.add(dv[keys], self.product(weights.T, self.grad[queries].T))
                    dk[keys] = on.add(dk[keys], self.product(spread.T, self.q[queries].T))
        return dk, dv

    def result(self, total: Array) -> Array:
        """Return sums as elements. They start from +0, so every zero is +0."""
        return self.plan.result(total)
