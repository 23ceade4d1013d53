"""The chain of fused multiply-adds that `tl.dot` in fp32 is on every GPU (`input_precision="ieee"`)."""

from __future__ import annotations

import numpy as np

from isobit.certifying.names.arithmetic import odd_sum
from isobit.certifying.names.leaf import Array, narrow, nearest, widen


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once, for float32 arrays that broadcast; a NaN has the bits 0x7FFFFFFF.

    Subnormals are kept also in a thread that flushes them.
    """
    with np.errstate(all="ignore"):
        return narrow(nearest(odd_sum(widen(a) * widen(b), widen(c))))


def chain(a: Array, b: Array, c: Array) -> Array:
    """Return a @ b.T + c for a [..., M, K], b [..., N, K], c [..., M, N]: k ascending, on top of c."""
    with np.errstate(all="ignore"):
        left, right, total = widen(a), widen(b), widen(c)
        for k in range(a.shape[-1]):
            total = nearest(odd_sum(left[..., :, None, k] * right[..., None, :, k], total))
        return narrow(total)
