"""The gradient of a norm's weight: the sum over tokens of grad · x̂, in the order of the samples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gpu.launching import run
from isobit.ops.gpu.ordered_rows import (
    BLOCK,
    WARPS,
    Leaves,
    fold,
    merge_items,
    merge_lanes,
    sum_leaves,
)
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, cut_into_leaves
from isobit.order.samples import Samples


@triton.jit
def sum_leaf_terms(
    grad: tl.tensor,
    x: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    leaves: tl.tensor,
    sums: tl.tensor,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sums of grad · x̂ over the tokens of a leaf, sums [leaves, HEADS * N].

    grad and x are [tokens, HEADS * N], means and scales fp32 [tokens * HEADS], leaves int64 [leaves, 2].
    """
    leaf = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, length = tl.load(leaves + leaf * 2), tl.load(leaves + leaf * 2 + 1)
    lane = tl.arange(0, 16)[:, None]
    total = tl.zeros((16, BLOCK), tl.float32)
    for at in range(0, length, 16):
        known = at + lane < length
        inside = known & (column < HEADS * N)
        token = start + at + lane  # [16, 1]
        place = token * (HEADS * N) + column
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if HEADS == 1:  # a row is a token
            if CENTRED:
                value = value - tl.load(means + token, mask=known, other=0.0)
            normal = value * tl.load(scales + token, mask=known, other=0.0)
        else:
            tl.static_assert(not CENTRED)
            row = token * HEADS + column // N
            normal = value * tl.load(scales + row, mask=inside, other=0.0)
        term = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * normal
        total = tl.where(known, total + term, total)
    place = leaf.to(tl.int64) * (HEADS * N) + tl.trans(column)  # [BLOCK, 1]
    tl.store(sums + place, merge_lanes(total, BLOCK), mask=tl.trans(column) < HEADS * N)


def sum_terms(
    grad: Tensor, x: Tensor, means: Tensor | None, scales: Tensor, samples: Samples, heads: int
) -> Tensor:
    """Return dweight [n] from contiguous grad and x; each token has `heads` rows, 0 means that a row is a token."""
    n = x.shape[-1]
    segments = samples.segments
    if heads:  # the tokens of each sample first, then heads, then samples
        segments = tuple(cut_into_leaves(*span, False) for span in samples.spans)
    leaves = Leaves.of(segments, x.device)
    sums = torch.empty(leaves.count, max(heads, 1) * n, dtype=torch.float32, device=x.device)
    run(
        sum_leaf_terms,
        (leaves.count, triton.cdiv(sums.shape[1], BLOCK)),
        grad,
        x,
        scales if means is None else means,
        scales,
        leaves.table,
        sums,
        warps=WARPS,
        N=n,
        HEADS=max(heads, 1),
        CENTRED=means is not None,
        BLOCK=BLOCK,
    )
    dtype = gradient_dtype(x.dtype, len(samples.spans), samples.total)
    if not heads:
        return sum_leaves(sums, leaves, dtype)
    if not samples.spans:
        return torch.zeros(n, dtype=dtype, device=x.device)
    tokens = fold(sums, leaves.bounds, None)
    by_sample = merge_items(tokens.reshape(-1, n), heads, FEATURE_CAP, None)
    return merge_items(by_sample, len(by_sample), SAMPLE_CAP, dtype, samples.total)[0]
