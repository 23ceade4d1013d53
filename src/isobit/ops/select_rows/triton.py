"""The Triton executor of select_rows: both directions are a lookup with a map of integers.

dx row r is row map[r] of the upstream gradient, where map is -1 for rows that were not chosen, which read nothing.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from isobit.ops.embedding.triton import TOKENS, look_up, run_columns
from isobit.ops.gpu.executors import triton_operator


def look_up_rows(ids: Tensor, table: Tensor, absent: int = 0) -> Tensor:
    """Return [len(ids), n], the rows of table [R, n] that ids name; +0 for ids that name none, or NaN if `absent`."""
    y = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=table.device)
    given = (ids.contiguous(), table.contiguous(), y, len(ids))
    programs = triton.cdiv(len(ids), TOKENS)
    how = {"ROWS": len(table), "TOKENS": TOKENS, "ABSENT": absent}
    run_columns(look_up, programs, table.shape[1], *given, **how)
    return y


def check_rows(rows: Tensor, count: int) -> None:
    """Raise unless rows name different rows of `count`; on a GPU when the device is synchronized."""
    ordered = rows.sort().values
    known = ((rows >= 0) & (rows < count)).all() & (ordered[1:] != ordered[:-1]).all()
    if rows.is_cuda:
        torch._assert_async(known)
    elif not known:
        raise IndexError("a row that x does not have, or a row that is chosen twice")


@triton_operator("select_rows")
def triton_select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen rows."""
    flat = x.reshape(-1, x.shape[-1])
    check_rows(rows, len(flat))
    return look_up_rows(rows, flat, absent=1)  # on a GPU whose builds leave assertions out


@triton_operator("select_rows_backward")
def triton_select_rows_backward(grad: Tensor, rows: Tensor, shape: list[int]) -> Tensor:
    """Return dx."""
    count = torch.Size(shape[:-1]).numel()
    places = torch.full((count,), -1, dtype=torch.int64, device=grad.device)
    places[rows] = torch.arange(len(rows), device=grad.device)
    return look_up_rows(places, grad).reshape(shape)
