"""Sum rows in the order of samples: leaves of tokens, folded left within a segment, and segments merged by the tree.

[Note: sums over tokens on a GPU]
A gradient of a parameter is a sum of one row of terms per token. Three kernels compute it, each over blocks of columns:

1. `sum_leaf_rows`, or an operator's own kernel that makes its terms on the fly, computes the sum of every leaf, up to
   256 tokens: 16 interleaved chains, merged by the tree. Its programs know a leaf's tokens from a table.
2. `fold_runs` adds the leaves of every segment from left to right.
3. `merge_runs` adds up to 16 neighbouring segments by the tree; it is launched until one row is left.

The tables are made on the host from the spans of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.device_tables import copied, kept
from isobit.ops.gpu.elementary import round_once
from isobit.ops.gpu.launching import run
from isobit.ops.gpu.sums import merge_columns
from isobit.ops.share import gradient_dtype
from isobit.order.plan import FEATURE_CAP, SAMPLE_CAP, Segment, count_segments, cut_into_leaves
from isobit.order.samples import Samples

BLOCK, WARPS = 64, 4  # columns of a program
WIDEST = 16  # rows that one program of merge_runs adds


def segments_of(samples: Samples, apart: bool) -> tuple[Segment, ...]:
    """Return the segments of samples, or every sample as one."""
    if apart:
        return tuple(cut_into_leaves(*span, False) for span in samples.spans)
    return samples.segments


@dataclass(frozen=True)
class Leaves:
    """The leaves of some segments, on the device of the sums.

    Attributes:
        table: int64 [leaves, 2], the first token and the number of tokens of each leaf.
        bounds: int64 [segments + 1], the first leaf of each segment, and the number of leaves.
    """

    table: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, samples: Samples, device: torch.device, apart: bool = False) -> Leaves:
        """Return the tables of the segments of samples, or of every sample apart."""

        def make() -> Leaves:
            segments = segments_of(samples, apart)
            leaves = [(leaf.start, leaf.length) for segment in segments for leaf in segment]
            bounds = list(accumulate((len(segment) for segment in segments), initial=0))
            return cls(copied(leaves, (-1, 2), device), copied(bounds, (-1,), device))

        return kept((segments_of, samples.spans, samples.total, apart), device, make)

    @property
    def count(self) -> int:
        """The number of leaves."""
        return len(self.table)


@triton.jit
def merge_lanes(lanes: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return [BLOCK, 1], the tree over the lanes of a leaf, lanes [16, BLOCK]."""
    return merge_columns(tl.trans(lanes), BLOCK, 16)


@triton.jit
def sum_leaf_rows(
    rows: tl.tensor, leaves: tl.tensor, sums: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Store sums [leaves, WIDTH], the sums of the rows [tokens, WIDTH] of each leaf; leaves is int64 [leaves, 2]."""
    leaf = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    start, length = tl.load(leaves + leaf * 2), tl.load(leaves + leaf * 2 + 1)
    lane = tl.arange(0, 16)[:, None]
    total = tl.zeros((16, BLOCK), tl.float32)
    for at in range(0, length, 16):
        known = at + lane < length
        place = (start + at + lane) * WIDTH + column
        value = tl.load(rows + place, mask=known & (column < WIDTH), other=0.0).to(tl.float32)
        total = tl.where(known, total + value, total)
    place = leaf.to(tl.int64) * WIDTH + tl.trans(column)  # [BLOCK, 1]
    tl.store(sums + place, merge_lanes(total, BLOCK), mask=tl.trans(column) < WIDTH)


@triton.jit
def store_sums(place: tl.tensor, total: tl.tensor, inside: tl.tensor, FINAL: tl.constexpr) -> None:
    """Store fp32 sums: rounded if they are final, else as they are."""
    if FINAL:
        total = round_once(total, place.dtype.element_ty)
    tl.store(place, total, mask=inside)


@triton.jit
def fold_runs(
    rows: tl.tensor,
    bounds: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store out [runs, WIDTH], the sums from left to right of rows [bounds[i], bounds[i + 1]), at least one each."""
    at, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(bounds + at), tl.load(bounds + at + 1)
    inside = column < WIDTH
    total = tl.load(rows + begin * WIDTH + column, mask=inside, other=0.0)
    for i in range(begin + 1, end):
        total = total + tl.load(rows + i * WIDTH + column, mask=inside, other=0.0)
    store_sums(out + at.to(tl.int64) * WIDTH + column, total, inside, FINAL)


@triton.jit
def merge_runs(
    rows: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store out [runs, WIDTH], the balanced tree over each COUNT neighbours of rows [runs * COUNT, WIDTH]."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
    inside = column < WIDTH
    place = (at * COUNT + tl.arange(0, COUNT)[None, :]) * WIDTH + column
    total = merge_columns(tl.load(rows + place, mask=inside, other=0.0), BLOCK, COUNT)
    store_sums(out + at * WIDTH + column, total, inside, FINAL)


def fold(rows: Tensor, bounds: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return [runs, n], the sums of runs of rows [rows, n] from left to right; fp32 and not final if dtype is None."""
    runs, width = len(bounds) - 1, rows.shape[1]
    out = torch.empty(runs, width, dtype=dtype or torch.float32, device=rows.device)
    grid, how = (runs, -(-width // BLOCK)), {"WIDTH": width, "FINAL": dtype is not None}
    run(fold_runs, grid, rows, bounds, out, warps=WARPS, BLOCK=BLOCK, **how)
    return out


def merge(rows: Tensor, count: int, dtype: torch.dtype | None) -> Tensor:
    """Return [rows / count, n], the tree over each `count` neighbours, a power of two above 1; dtype as for `fold`."""
    width = rows.shape[1]
    while count > 1:
        merged = min(count, WIDEST)
        count //= merged
        kind = None if count > 1 else dtype
        out = torch.empty(
            len(rows) // merged, width, dtype=kind or torch.float32, device=rows.device
        )
        grid, how = (len(out), -(-width // BLOCK)), {"WIDTH": width, "COUNT": merged}
        run(merge_runs, grid, rows, out, warps=WARPS, BLOCK=BLOCK, FINAL=kind is not None, **how)
        rows = out
    return rows


def sum_rows(rows: Tensor, samples: Samples, dtype: torch.dtype) -> Tensor:
    """Return [n], the sum of contiguous rows [tokens, n] over samples, rounded to dtype; zero if none."""
    leaves, width = Leaves.of(samples, rows.device), rows.shape[1]
    sums = torch.empty(leaves.count, width, dtype=torch.float32, device=rows.device)
    grid = (leaves.count, -(-width // BLOCK))
    run(sum_leaf_rows, grid, rows, leaves.table, sums, warps=WARPS, WIDTH=width, BLOCK=BLOCK)
    return sum_leaves(sums, leaves, dtype)


def sum_leaves(sums: Tensor, leaves: Leaves, dtype: torch.dtype) -> Tensor:
    """Return [n], the sum of all leaves, sums [leaves, n] fp32, in their order, rounded to dtype; zero if none."""
    segments = len(leaves.bounds) - 1
    if not segments:
        return torch.zeros(sums.shape[1], dtype=dtype, device=sums.device)
    folded = fold(sums, leaves.bounds, None if segments > 1 else dtype)
    return merge(folded, segments, dtype)[0] if segments > 1 else folded[0]


def merge_items(
    rows: Tensor, items: int, cap: int, dtype: torch.dtype | None, of: int = 0
) -> Tensor:
    """Return [rows / items, n], the sums of each `items` neighbours in the order of `isobit.order.tree.merge_items`.

    The items are one subtree of `of` items, or all of them if `of` is 0.
    """
    size = (of or items) // count_segments(of or items, 1, cap)
    count = items // size
    bounds = torch.arange(0, len(rows) + 1, size, dtype=torch.int64, device=rows.device)
    rows = fold(rows, bounds, None if count > 1 else dtype)
    return merge(rows, count, dtype) if count > 1 else rows


# The gradient of a norm's weight: the sum over tokens of grad · x̂, in the order of the samples.


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
    # With heads: the tokens of each sample first, then heads, then samples.
    leaves = Leaves.of(samples, x.device, apart=heads > 0)
    sums = torch.empty(leaves.count, max(heads, 1) * n, dtype=torch.float32, device=x.device)
    run(
        sum_leaf_terms,
        (leaves.count, -(-sums.shape[1] // BLOCK)),
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
