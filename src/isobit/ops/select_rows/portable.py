"""The portable executor of select_rows: rows are copied, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError


def check_rows(rows: Tensor, count: int) -> None:
    """Raise unless rows name different rows of `count`: the gradient of a repeated row would be a sum."""
    if not rows.numel():
        return
    outside = (rows < 0) | (rows >= count)
    if bool(outside.any()):
        raise ArgumentError(
            expected=f"rows from 0 to {count - 1}, counted over all axes of x but the last",
            received=f"row {int(rows[outside][0])}",
            remedy="a row of sample b and token t of x [B, T, n] is b * T + t",
        )
    ordered = rows.sort().values
    repeated = ordered[1:] == ordered[:-1]
    if bool(repeated.any()):
        raise ArgumentError(
            expected="each row once: its gradient is copied, and not a sum",
            received=f"row {int(ordered[1:][repeated][0])} more than once",
            remedy="select unique rows; isobit.embedding(rows, table) sums the gradients of repeated ones",
        )


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen rows of x [..., n] as [R, n]."""
    flat = x.reshape(-1, x.shape[-1])
    check_rows(rows, len(flat))
    return flat.index_select(0, rows)


def select_rows_backward(grad: Tensor, rows: Tensor, shape: list[int]) -> Tensor:
    """Return dx: the rows of grad at the places they came from, and +0 elsewhere."""
    dx = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
    dx.view(-1, shape[-1]).index_copy_(0, rows, grad)
    return dx
