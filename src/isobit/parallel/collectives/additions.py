"""Additions of partial sums, element by element: the same bits in every thread, every NaN the same NaN.

torch.set_flush_denormal is a mode of a thread, and threads of torch's pool keep the mode that they began with. So a
tensor is added in stretches below torch's grain, which the calling thread adds itself, with subnormal numbers kept.
Of two NaNs, or of inf − inf, the processor makes a NaN whose bits depend on which operand stood left: settle_nans()
puts one NaN in place of all. A sum that holds a NaN holds it to the end, so it is enough to settle the last sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from isobit import machine
from isobit.ops.portable.rounding import settle_nans

# Below torch's grain of 32,768 elements an addition never starts threads of its own, so a worker has no second team.
ELEMENTS_AT_ONCE = 32768


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Keep subnormal numbers in this thread's additions, then restore its mode; also a decorator: `@subnormals_kept()`.

    Unlike isolation.keeping_subnormals it starts no thread: for additions that never reach torch's pool.
    """
    flushing = machine.flushes_subnormals()
    if flushing:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushing:
            torch.set_flush_denormal(True)


def round_total(total: Tensor, dtype: torch.dtype) -> Tensor:
    """In the result's dtype, every NaN the same; the total is written to where it has that dtype already."""
    return settle_nans(total.to(dtype))


def add_two(left: Tensor, right: Tensor, total: Tensor) -> None:
    """left + right of flat tensors, a stretch at a time."""
    for at in range(0, total.numel(), ELEMENTS_AT_ONCE):
        part = slice(at, at + ELEMENTS_AT_ONCE)
        settle_nans(torch.add(left[part], right[part], out=total[part]))


def add_rows(rows: Sequence[Tensor], total: Tensor) -> None:
    """The balanced tree over rows, by rank, into `total`; the rows are overwritten on the way."""
    for at in range(0, total.numel(), ELEMENTS_AT_ONCE):
        level = [row[at : at + ELEMENTS_AT_ONCE] for row in rows]
        while len(level) > 2:
            level = [
                torch.add(left, right, out=left)
                for left, right in zip(level[::2], level[1::2], strict=True)
            ]
        settle_nans(torch.add(level[0], level[1], out=total[at : at + ELEMENTS_AT_ONCE]))


def add_into(left: Tensor, right: Tensor) -> Tensor:
    """left += right of contiguous tensors of one shape; NaNs are as the processor makes them."""
    with subnormals_kept():
        for ours, theirs in zip(_stretches(left), _stretches(right), strict=True):
            ours.add_(theirs)
    return left


def add_to_rows(rows: Tensor, row: Tensor) -> None:
    """rows [..., N] += row [N], contiguous."""
    with subnormals_kept():
        for one in rows.view(-1, rows.shape[-1]):
            for ours, theirs in zip(_stretches(one), _stretches(row), strict=True):
                ours.add_(theirs)


def _stretches(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.numel() <= ELEMENTS_AT_ONCE:
        return (tensor,)
    return torch.split(tensor.view(-1), ELEMENTS_AT_ONCE)
