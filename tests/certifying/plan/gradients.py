"""Norms and softmax with their gradients by the plan, over either domain; see operators.py."""

from __future__ import annotations

import numpy as np

from isobit.certifying.names.names import Array
from isobit.order.samples import Samples
from tests.certifying.plan.operators import Arithmetic, exp_nonpositive, fold, striped, sum_last


def mean_last(plan: Arithmetic, terms: Array) -> Array:
    """Return [R, 1], the means of terms [R, n]."""
    return plan.on.div(sum_last(plan, terms), plan.on.constant(terms.shape[1]))


def sum_tokens(plan: Arithmetic, terms: Array, samples: Samples) -> Array:
    """Return [n], the sums of terms [tokens, n] in the order of the samples, rounded."""
    columns = np.ascontiguousarray(terms.T)
    return plan.result(fold(plan, samples.segments, lambda leaf: striped(plan, columns, leaf)))


def rms_norm_grads(
    plan: Arithmetic, grad: Array, x: Array, weight: Array, scales: Array, samples: Samples
) -> tuple[Array, Array]:
    """Return dx [M, N] and dweight [N] of an RMSNorm whose scales [M] are known."""
    on, upstream = plan.on, plan.widen(grad)
    normal, weighted = on.mul(plan.widen(x), scales[:, None]), on.mul(upstream, plan.widen(weight))
    share = mean_last(plan, on.mul(weighted, normal))
    dx = on.mul(on.sub(weighted, on.mul(normal, share)), scales[:, None])
    return plan.result(dx), sum_tokens(plan, on.mul(upstream, normal), samples)


def layer_norm(plan: Arithmetic, x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Return [M, N]: ((x − mean) · scale) · weight + bias."""
    on, wide = plan.on, plan.widen(x)
    rest = on.sub(wide, mean_last(plan, wide))
    variance = mean_last(plan, on.mul(rest, rest))
    scale = on.div(on.constant(1.0), on.sqrt(on.add(variance, on.constant(eps))))
    return plan.result(on.add(on.mul(on.mul(rest, scale), plan.widen(weight)), plan.widen(bias)))


def layer_norm_grads(
    plan: Arithmetic,
    grad: Array,
    x: Array,
    weight: Array,
    means: Array,
    scales: Array,
    samples: Samples,
) -> tuple[Array, Array, Array]:
    """Return dx [M, N], dweight and dbias [N] of a LayerNorm whose means and scales [M] are known."""
    on, upstream = plan.on, plan.widen(grad)
    normal = on.mul(on.sub(plan.widen(x), means[:, None]), scales[:, None])
    weighted = on.mul(upstream, plan.widen(weight))
    share, level = mean_last(plan, on.mul(weighted, normal)), mean_last(plan, weighted)
    dx = on.mul(on.sub(on.sub(weighted, level), on.mul(normal, share)), scales[:, None])
    dweight = sum_tokens(plan, on.mul(upstream, normal), samples)
    return plan.result(dx), dweight, sum_tokens(plan, upstream, samples)


def softmax_grad(plan: Arithmetic, grad: Array, y: Array) -> Array:
    """Return [M, N]: y · (grad − Σ y · grad)."""
    on, upstream, weights = plan.on, plan.widen(grad), plan.widen(y)
    return plan.result(on.mul(weights, on.sub(upstream, sum_last(plan, on.mul(weights, upstream)))))


def log_softmax_grad(plan: Arithmetic, grad: Array, y: Array) -> Array:
    """Return [M, N]: grad − exp(y) · Σ grad."""
    on, upstream = plan.on, plan.widen(grad)
    weights = exp_nonpositive(on, plan.widen(y))
    return plan.result(on.sub(upstream, on.mul(weights, sum_last(plan, upstream))))
