"""Products and rows by the plan: linear, the weight gradient, rms_norm and softmax. See [Note: plan and kernel]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from isobit.certifying.names.names import Array
from isobit.order.evaluate import feature_segments
from isobit.order.plan import LANES, FeaturePlan, Leaf, Segment
from isobit.order.samples import Samples
from isobit.order.tree import merge
from tests.certifying.plan.domain import Domain

INSTRUCTION = 16  # products of one tensor-core instruction of 16-bit operands


@dataclass(frozen=True)
class Arithmetic:
    """A domain, and how products are added in it.

    Attributes:
        on: The domain.
        dtype: Of the elements: "f32", "bf16" or "f16".
        engine: The tensor core of 16-bit elements; fp32 products are chains of fused multiply-adds.
    """

    on: Domain
    dtype: str
    engine: str = ""

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """Return an array of one fp32 constant."""
        return np.full(shape, self.on.constant(value))

    def widen(self, value: Array) -> Array:
        """Return elements as fp32."""
        return value if self.dtype == "f32" else self.on.widen(value, self.dtype)

    def narrow(self, value: Array) -> Array:
        """Return fp32 values as elements."""
        return value if self.dtype == "f32" else self.on.round(value, self.dtype)

    def run(self, left: Array, right: Array) -> Array:
        """Return [R, C], one run of products from +0: left [R, k] against right [C, k]."""
        total = self.full((len(left), len(right)), 0.0)
        if self.dtype == "f32":
            for k in range(left.shape[1]):
                total = self.on.fma(left[:, k, None], right[None, :, k], total)
            return total
        return self.on.dot(self.pad(left), self.pad(right), total, self.engine, self.dtype)

    def pad(self, factors: Array) -> Array:
        """Return factors [R, k], padded with +0 to whole tensor-core instructions."""
        widths = ((0, 0), (0, -factors.shape[1] % INSTRUCTION))
        return np.pad(factors, widths, constant_values=self.on.constant16(0))

    def result(self, total: Array) -> Array:
        """Return sums rounded to the elements' dtype, with the one NaN of isobit's results."""
        return self.on.settle(total, self.narrow(total), self.dtype)


def fold(plan: Arithmetic, segments: Sequence[Segment], run: Callable[[Leaf], Array]) -> Array:
    """Return the sum of all segments: leaves are folded left, segments are merged by the tree."""
    totals = [reduce(plan.on.add, [run(leaf) for leaf in segment]) for segment in segments]
    return merge(totals, plan.on.add)


def linear(plan: Arithmetic, x: Array, weight: Array) -> Array:
    """Return [M, N], the sums of x [M, K] against weight [N, K], in fp32."""

    def run(leaf: Leaf) -> Array:
        part = slice(leaf.start, leaf.start + leaf.length)
        return plan.run(x[:, part], weight[:, part])

    engine = "chain" if plan.dtype == "f32" else plan.engine
    return fold(plan, feature_segments(x.shape[1], engine), run)


def weight_grad(plan: Arithmetic, grad: Array, x: Array, samples: Samples) -> Array:
    """Return [N, K], the sums over tokens of grad [tokens, N] and x [tokens, K], in fp32."""

    def run(leaf: Leaf) -> Array:
        part = slice(leaf.start, leaf.start + leaf.length)
        return plan.run(grad[part].T, x[part].T)

    return fold(plan, samples.segments, run)


def striped(plan: Arithmetic, terms: Array, leaf: Leaf) -> Array:
    """Return [R], the sums of the columns of one leaf of terms [R, n]: 16 lanes, merged by the tree."""
    lanes = plan.full((LANES, len(terms)), 0.0)
    for at in range(0, leaf.length, LANES):
        count = min(LANES, leaf.length - at)
        columns = terms[:, leaf.start + at : leaf.start + at + count]
        lanes[:count] = plan.on.add(lanes[:count], columns.T)
    return merge(list(lanes), plan.on.add)


def sum_last(plan: Arithmetic, terms: Array) -> Array:
    """Return [R, 1], the sums of terms [R, n] in the order of a feature axis."""
    segments = FeaturePlan(terms.shape[1]).segments
    return fold(plan, segments, lambda leaf: striped(plan, terms, leaf))[:, None]


def rms_norm(plan: Arithmetic, x: Array, weight: Array, eps: float) -> Array:
    """Return [M, N]: (x · scale) · weight with scale = 1 / sqrt(Σ x² / N + eps)."""
    on, wide, factor = plan.on, plan.widen(x), plan.widen(weight)
    mean = on.div(sum_last(plan, on.mul(wide, wide)), on.constant(x.shape[1]))
    scale = on.div(on.constant(1.0), on.sqrt(on.add(mean, on.constant(eps))))
    return plan.result(on.mul(on.mul(wide, scale), factor))


def softmax(plan: Arithmetic, x: Array) -> Array:
    """Return [M, N]: exp(x − max) / Σ exp(x − max)."""
    wide = plan.widen(x)
    top = largest(plan, wide, plan.full((len(x), 1), -np.inf))
    terms = exp_nonpositive(plan.on, plan.on.sub(wide, top))
    return plan.result(plan.on.div(terms, sum_last(plan, terms)))


def largest(plan: Arithmetic, values: Array, before: Array) -> Array:
    """Return [R, 1], the maximum of `before` [R, 1] and of the columns of values [R, n]."""
    return plan.on.maximum([before, *np.split(values, values.shape[1], axis=1)])


PER_OCTAVE, LOWEST, OCTAVE, OCTAVE_REST = map(
    float.fromhex, ("0x1.715476p+0", "-0x1.5d589ep+6", "0x1.62e4p-1", "0x1.7f7d1cp-20")
)
TO_INTEGER = 1.5 * 2.0**23 + 127
Q = ("0x1.6a23ccp-10", "0x1.123a20p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2")


def exp_nonpositive(on: Domain, x: Array) -> Array:
    """Return exp(x) for x <= 0 by the chain of csrc/exponential.h."""
    shifted = on.add(on.mul(x, on.constant(PER_OCTAVE)), on.constant(TO_INTEGER))
    n = on.add(shifted, on.constant(-TO_INTEGER))
    r = on.add(x, on.mul(n, on.constant(-OCTAVE)))
    r = on.add(r, on.mul(n, on.constant(-OCTAVE_REST)))
    q = on.constant(float.fromhex(Q[0]))
    for coefficient in Q[1:]:
        q = on.add(on.mul(q, r), on.constant(float.fromhex(coefficient)))
    mantissa = on.add(on.add(r, on.mul(on.mul(r, r), q)), on.constant(1.0))
    scaled = on.mul(mantissa, on.shift_left(shifted, 23))
    return on.choose("lt", x, on.constant(LOWEST), on.constant(0.0), scaled)
