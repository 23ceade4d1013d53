"""The fused multiply-add of fp32 over numpy arrays, and the ascending chain that fp32 `tl.dot` is on every GPU."""

from __future__ import annotations

import numpy as np

from isobit.compiled.leaf import Array, narrow, nearest, widen


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once, for float32 arrays that broadcast; a NaN has the bits 0x7FFFFFFF."""
    with np.errstate(all="ignore"):
        return narrow(add_product(widen(a), widen(b), widen(c)))


def chain(a: Array, b: Array, c: Array) -> Array:
    """Return a @ b.T + c for a [..., M, K], b [..., N, K], c [..., M, N]: fused multiply-adds, k ascending from c."""
    with np.errstate(all="ignore"):
        left, right, total = widen(a), widen(b), widen(c)
        for k in range(a.shape[-1]):
            total = add_product(left[..., :, None, k], right[..., None, :, k], total)
        return narrow(total)


def add_product(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once to fp32, for fp32 values in float64, and in float64."""
    product = a * b  # exact
    total = product + c
    # What the sum in float64 dropped. It is rounded to odd, so that the rounding to fp32 takes account of it.
    there = total - product
    dropped = (product - (total - there)) + (c - there)
    bits = total.view(np.int64)
    odd = (dropped != 0) & (bits & 1 == 0) & np.isfinite(total)
    if odd.any():
        bits[odd] += np.where((dropped > 0) == (total > 0), 1, -1)[odd]
    return nearest(total)
