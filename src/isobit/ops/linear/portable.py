"""The portable executor: the same order in plain torch operations, on any CPU. Slow, and exact."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.order.plan import LANES, Leaf, Segment
from isobit.order.tree import Counter, Node, merge


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a*b + c, rounded once to fp32 (fp64 operands: plainly, in fp64).

    The product of two fp32 values is exact in fp64. The sum is rounded there to odd, so that the second
    rounding, to fp32, is the right one.
    """
    if c.dtype == torch.float64:
        return a * b + c
    product, carried = a.double() * b.double(), c.double()
    total = product + carried
    back = total - product
    lost = (product - (total - back)) + (carried - back)
    even = (total.view(torch.int64) & 1) == 0
    inexact = torch.isfinite(total) & (lost != 0) & even
    toward = torch.where(lost > 0, torch.inf, -torch.inf).double()
    return torch.where(inexact, torch.nextafter(total, toward), total).float()


def sum_leaf(leaf: Leaf, left: Tensor, right: Tensor) -> Tensor:
    """The ascending chain of one leaf, for all pairs of rows of left [R, k] and right [C, k]."""
    total = left.new_zeros(left.shape[0], right.shape[0])
    for k in range(leaf.start, leaf.start + leaf.length):
        total = multiply_add(left[:, k, None], right[None, :, k], total)
    return total


def sum_striped(leaf: Leaf, rows: Tensor) -> Tensor:
    """The plain sum over the rows of one leaf: 16 lanes, merged by the tree."""
    lanes = rows.new_zeros(LANES, rows.shape[1])
    for at in range(0, leaf.length, LANES):
        count = min(LANES, leaf.length - at)
        lanes[:count] += rows[leaf.start + at : leaf.start + at + count]
    return merge(list(lanes.unbind(0)), torch.add)


def merge_segments(
    segments: Sequence[Segment], sum_run: Callable[[Leaf], Any], first: int
) -> list[Any]:
    """The roots of a share whose first segment is `first`: leaves folded left, segments merged by the tree."""
    counter: Counter[Any] = Counter(operator.add)
    for index, segment in enumerate(segments):
        total: Any = None
        for leaf in segment:
            run = sum_run(leaf)
            total = total + run if leaf.fold and total is not None else run
        if total is not None:
            counter.push(Node(0, first + index), total)
    return [value for _, value in counter]


def sum_products(
    segments: Sequence[Segment], left: Tensor, right: Tensor, first: int = 0
) -> Tensor:
    """[roots, R, C] of left [R, k] against right [C, k]."""
    roots = merge_segments(segments, lambda leaf: sum_leaf(leaf, left, right), first)
    return one_nan(torch.stack(roots)) if roots else left.new_zeros(0, len(left), len(right))


def sum_rows(segments: Sequence[Segment], rows: Tensor, first: int = 0) -> Tensor:
    """[roots, C] of rows [T, C]."""
    roots = merge_segments(segments, lambda leaf: sum_striped(leaf, rows), first)
    return one_nan(torch.stack(roots)) if roots else rows.new_zeros(0, rows.shape[1])


def widen(tensor: Tensor) -> Tensor:
    """As 2-d rows in the dtype that additions have."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if tensor.dtype == torch.float64 else rows.float()


def round_once(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum to the result's dtype, every NaN as the one NaN of isobit's results.

    Whoever merges sums of isobit's operators rounds by this, never by `Tensor.to`: torch makes the bf16 NaN 0xffff in
    vectors and 0x7fc0 in their tails, and keeps the sign and payload of an fp32 NaN, which depend on operand order.
    """
    return one_nan(total.to(dtype))


def one_nan(tensor: Tensor) -> Tensor:
    """Replace every NaN by the positive quiet one: which sign and payload survive depends on operand order."""
    return torch.where(tensor.isnan(), torch.nan, tensor)
