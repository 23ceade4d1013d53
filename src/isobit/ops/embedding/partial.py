"""The embedding with a table that is cut over ranks: a rank's part of a lookup, and the gradient of its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.arguments import check_tensors, refuse_shape
from isobit.ops.embedding.op import NO_PADDING, check_embedding
from isobit.ops.portable.samples import spans_of
from isobit.order.samples import Samples


def lookup(ids: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Return [..., H] from the rows `first_row` and on of a table: the rows of ids, and +0 for rows of other ranks."""
    check_tensors(weight=weight)
    check_embedding(ids, weight, None)
    local, held = localise(ids, first_row, len(weight))
    if not len(weight):
        return weight.new_zeros(*ids.shape, weight.shape[1])
    rows = operator_of("", weight.dtype)(
        local.clamp(max=len(weight) - 1), weight.detach(), None, NO_PADDING
    )
    return rows.masked_fill_(~held.unsqueeze(-1), 0.0)


def weight_grad(
    grad: Tensor,
    ids: Tensor,
    samples: Samples,
    first_row: int,
    rows: int,
    *,
    padding_idx: int | None = None,
) -> Tensor:
    """Return [rows, H], the rows `first_row` and on of the whole table's gradient, with the same bits.

    Tokens of other rows add +0, which changes no bits. The result is not rounded if the samples are a share of the
    global batch. `padding_idx` is a row of the whole table.
    """
    check_tensors(grad=grad)
    if grad.shape[:-1] != ids.shape:
        refuse_shape(
            "grad", grad, f"{[*ids.shape, 'H']}", "pass the gradient of the rows that ids name"
        )
    local, _ = localise(ids, first_row, rows)
    if padding_idx is not None:
        local = local.masked_fill(ids == padding_idx, rows)
    # One row more, for the tokens of other ranks: it is passed as padding, which the operator skips.
    spans = spans_of(samples, ids.unsqueeze(-1))
    table = operator_of("_weight_grad", grad.dtype)(
        grad, local, spans, rows + 1, rows, samples.total
    )
    return table[:rows]


def localise(ids: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return ids counted from `first_row`, or `rows` where another rank owns them; and whether this rank does."""
    if first_row < 0 or rows < 0:
        raise ArgumentError(
            expected="first_row and rows of 0 or more",
            received=f"{first_row} and {rows}",
            remedy="pass the first row of this part of the table, and its number of rows",
        )
    held = (ids >= first_row) & (ids < first_row + rows)
    return torch.where(held, ids - first_row, rows), held


def operator_of(suffix: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the embedding operator of the executor that serves this dtype."""
    native = dispatch.is_native(dtype)
    return getattr(torch.ops.isobit, f"{'' if native else 'portable_'}embedding{suffix}")  # type: ignore[no-any-return]
