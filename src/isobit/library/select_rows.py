"""Claims of select-rows-v1: rows and their gradients are copied, bit for bit; and wrong selections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library import refused_calls
from isobit.library.claims import (
    forward_and_gradients,
    in_every_storage_and_thread_count,
    must_raise,
    placements,
    put_among_random,
    with_backward,
)
from isobit.ops.select_rows.op import select_rows
from isobit.order.samples import Samples

Select = Callable[[Tensor, Tensor], Tensor]
# Of samples: a copy knows no leaves, so they need not be longer.
LENGTHS = (1, 3, 0, 7, 9, 5, *(2, 1) * 16)


@dataclass(frozen=True)
class Selection:
    """A selection that a contract can call with rows alone: it then chooses all of them, the last one first."""

    select: Select

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows of x in reverse."""
        return self.select(x, torch.arange(len(x) - 1, -1, -1))


def last_rows(described: Samples) -> Tensor:
    """Return the last row of each sample that has one, the last sample first."""
    ends = [start + length - 1 for start, length in described.spans if length]
    return torch.tensor(list(reversed(ends)), dtype=torch.int64)


def copies(subject: Selection, case: Case, tally: Tally) -> None:
    """The last row of each sample, and its gradient, have their bits in every placement, storage and thread count."""
    described = Samples.packed(LENGTHS)
    rows = case.draw((described.rows, case.sizes["n"]), 70, "wide")
    rows[::3] *= -0.0  # zeros of both signs
    rows[-1], rows[10] = torch.nan, torch.inf
    chosen = last_rows(described)
    grad = case.draw((len(chosen), case.sizes["n"]), 71, "wide")
    grad[0] = -0.0
    tally.count(len(chosen))

    def compare(rows: Tensor, grad: Tensor, lying: Samples, where: str) -> None:
        at = last_rows(lying)
        y, (dx,) = forward_and_gradients(lambda x: subject.select(x, at), [rows], grad)
        tally.same(y.detach(), rows[at], f"rows {where}")
        tally.same(dx[at], grad, f"their gradients {where}")
        rest = torch.ones(len(rows), dtype=torch.bool)
        rest[at] = False
        tally.same(dx[rest], torch.zeros_like(dx[rest]), f"gradients of other rows {where}")

    compare(rows, grad, described, "packed")
    for where, lying in placements(LENGTHS, 12):
        compare(put_among_random(case, rows, lying, 72), grad, lying, where)
    in_every_storage_and_thread_count(compare, [rows, grad], described)


def refuses(subject: Selection, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    tally.count(1)
    for what, given, named in refused_calls.select_rows():
        must_raise(partial(subject.select, *given, **named), what, tally)


# ---- planted --------------------------------------------------------------------------------------------------


def with_gradient(scatter: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Selection:
    """Return a selection whose dx is `scatter(zeros, rows, grad)`."""

    def select(x: Tensor, rows: Tensor) -> Tensor:
        def backward(grad: Tensor, x: Tensor) -> tuple[Tensor]:
            return (scatter(torch.zeros_like(x), rows, grad),)

        return with_backward(lambda x: select_rows(x, rows), backward, x)

    return Selection(select)


@Selection
def stock(x: Tensor, rows: Tensor) -> Tensor:
    """Index as torch does: its gradient is added into zeros, so that −0 becomes +0."""
    return x[rows]


@Selection
def in_ascending_order(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows in the order of x, as a mask would."""
    return select_rows(x, rows.sort().values)


@Selection
def one_row_later(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows behind the chosen ones."""
    return select_rows(x, (rows + 1) % len(x))


@Selection
def by_a_product(x: Tensor, rows: Tensor) -> Tensor:
    """Multiply by a matrix of zeros and ones: a NaN elsewhere spreads."""
    return torch.nn.functional.one_hot(rows, len(x)).to(x.dtype) @ x


@Selection
def repeats_allowed(x: Tensor, rows: Tensor) -> Tensor:
    """Take rows that are chosen twice, as indexing does."""
    return torch.embedding(x.reshape(-1, x.shape[-1]), rows)


ours = Selection(select_rows)
added_into_zeros = with_gradient(lambda zeros, rows, grad: zeros.index_add(0, rows, grad))
gradient_of_neighbours = with_gradient(
    lambda zeros, rows, grad: zeros.index_copy(0, rows.sort().values, grad)
)
gradient_left_over = with_gradient(
    lambda zeros, rows, grad: (zeros + 2.0**-20).index_copy(0, rows, grad)
)
