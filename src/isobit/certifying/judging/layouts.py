"""Which view of a storage a tensor is, at any number of rows: its sizes, strides and offset as functions of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.certifying.running.execution import View


@dataclass(frozen=True)
class Follows:
    """A whole number that is `constant + per_row * rows` at any number of rows."""

    constant: int
    per_row: int = 0

    def at(self, rows: int) -> int:
        """Return the number at so many rows."""
        return self.constant + self.per_row * rows

    def __str__(self) -> str:
        if not self.per_row:
            return str(self.constant)
        rest = f"{self.constant} + " if self.constant else ""
        return f"{rest}{self.per_row}·rows"


def follow(here: int, rows: int, there: int, other_rows: int) -> Follows | None:
    """Return how a number follows the rows, from its values at two numbers of rows.

    Example:
        >>> print(follow(256, 3, 256, 70), follow(96, 3, 2240, 70), follow(3, 3, 71, 71))
        256 32·rows 1·rows
    """
    if here == there:
        return Follows(here)
    slope, left = divmod(there - here, other_rows - rows)
    return None if left else Follows(here - slope * rows, slope)


@dataclass(frozen=True)
class Layout:
    """A view of a storage at any number of rows."""

    dtype: torch.dtype
    shape: tuple[Follows, ...]
    stride: tuple[Follows, ...]
    offset: Follows

    def fits(self, rows: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> bool:
        """Tell whether a tensor at so many rows is this view; the stride of an axis of one element means nothing."""
        return (
            len(shape) == len(self.shape)
            and offset == self.offset.at(rows)
            and all(a == b.at(rows) for a, b in zip(shape, self.shape, strict=True))
            and all(
                size == 1 or a == b.at(rows)
                for size, a, b in zip(shape, stride, self.stride, strict=True)
            )
        )


def layout_at(one: View, rows: int, other: View, other_rows: int) -> Layout | None:
    """Return the view that two tensors are at two numbers of rows, or None if they are not one view."""
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return None
    numbers = [
        follow(a, rows, b, other_rows)
        for a, b in zip(
            (*one.shape, *one.stride, one.offset),
            (*other.shape, *other.stride, other.offset),
            strict=True,
        )
    ]
    found = [each for each in numbers if each is not None]
    axes = len(one.shape)
    if len(found) < len(numbers):
        return None
    moves = [
        *(each for each, size in zip(found[axes:-1], one.shape, strict=True) if size != 1),
        found[-1],
    ]
    if one.room == other.room and any(each.per_row for each in moves):
        return None  # other elements of the same storage
    return Layout(one.dtype, tuple(found[:axes]), tuple(found[axes:-1]), found[-1])


def fixed_layout(one: View) -> Layout:
    """Return the layout of a view that has no rows."""
    return Layout(
        one.dtype,
        tuple(map(Follows, one.shape)),
        tuple(map(Follows, one.stride)),
        Follows(one.offset),
    )


def find_layouts(
    mine: Sequence[View], rows: int, others: Sequence[View], other_rows: int
) -> list[tuple[Layout, View]]:
    """Return the views of a storage that are there at both numbers of rows, with the tensor at the first."""
    found, taken = list[tuple[Layout, View]](), set[int]()
    for number, view in enumerate(mine):
        # the one that came at the same place first, since two may fit
        places = sorted(range(len(others)), key=lambda at: (at != number, at))
        for at in places:
            layout = layout_at(view, rows, others[at], other_rows)
            if at not in taken and layout is not None:
                taken.add(at)
                found.append((layout, view))
                break
    return found
