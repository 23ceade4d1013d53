"""Which elements of a result are probed in one call, and where their terms are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from isobit.auditing.orders.found_sum import FoundSum, Index
from isobit.reveal.targets.tensor_target import TensorTarget

MOST_TERMS = 1 << 24  # of all places together: more would take long to write
ENOUGH_PLACES = 16  # with fewer, the rows of other samples are probed too


@dataclass(frozen=True)
class Axis:
    """A dimension of the carrier whose entries belong to different elements of the result.

    Attributes:
        dim: the carrier's dimension.
        along: the result's dimension.
        entries: indices of the carrier.
        offset: an element's index minus its entry's.
        at: the position in `entries` of the element that is asked for.
    """

    dim: int
    along: int
    entries: range
    offset: int
    at: int

    @property
    def elements(self) -> range:
        """Indices of the result."""
        return range(self.entries.start + self.offset, self.entries.stop + self.offset)


@dataclass(frozen=True)
class CallTarget:
    """A target made of a call.

    Attributes:
        target: what is revealed.
        element: the element of the result that is read.
        axes: the places that are probed.
    """

    target: TensorTarget
    element: Index
    axes: tuple[Axis, ...]

    @property
    def own(self) -> bool:
        """Whether all places belong to one sample: none lies along the result's first dimension."""
        return all(axis.along != 0 for axis in self.axes)

    def unlike_element(self) -> Index | None:
        """Return an element of the same sample that is added in another order, if probing found one."""
        alike = set(self.target.alike().tolist())
        others = (place for place in range(len(self.target.terms)) if place not in alike)
        place = next(others, None) if self.own else None
        if place is None:
            return None
        element = list(self.element)
        for axis in reversed(self.axes):
            element[axis.along] = axis.elements[place % len(axis.entries)]
            place //= len(axis.entries)
        return tuple(element)


def choose_axes(found: FoundSum, carrier: Tensor, out: Tensor) -> list[Axis]:
    """Choose the places that are probed: those of the same sample if there are enough, else all."""
    axes = []
    for dim, along in found.places.items():
        offset = found.element[along] - found.first[dim]
        entries = range(max(0, -offset), min(carrier.shape[dim], out.shape[along] - offset))
        axes.append(Axis(dim, along, entries, offset, found.first[dim] - entries.start))
    own = [axis for axis in axes if axis.along != 0]
    if count_places(own) >= min(ENOUGH_PLACES, found.n):
        axes = own
    return _limit(axes, max(MOST_TERMS // found.n, 1))


def _limit(axes: list[Axis], most: int) -> list[Axis]:
    """Narrow axes to at most so many places, around the one that is asked for. The call is not narrowed."""
    kept = []
    for axis in sorted(axes, key=lambda axis: -len(axis.entries)):
        count = min(len(axis.entries), max(most, 1))
        most //= count
        start = min(max(axis.at - count // 2, 0), len(axis.entries) - count)
        entries = axis.entries[start : start + count]
        kept.append(Axis(axis.dim, axis.along, entries, axis.offset, axis.at - start))
    return kept


def count_places(axes: Sequence[Axis]) -> int:
    """Return the number of places."""
    return math.prod(len(axis.entries) for axis in axes)


def place_of(axes: Sequence[Axis]) -> int:
    """Return the number of the place that is asked for."""
    place = 0
    for axis in axes:
        place = place * len(axis.entries) + axis.at
    return place


def view_of(tensor: Tensor, at: Index, ranges: Mapping[int, range], order: Sequence[int]) -> Tensor:
    """Return the part of a tensor with these ranges, its dimensions in this order; the others are fixed at `at`."""
    kept = list(range(tensor.dim()))
    for dim in reversed(range(tensor.dim())):
        if dim in ranges:
            tensor = tensor.narrow(dim, ranges[dim].start, len(ranges[dim]))
        else:
            tensor = tensor.select(dim, at[dim])
            kept.remove(dim)
    return tensor.permute([kept.index(dim) for dim in order])


def read_places(out: Tensor, element: Index, axes: Sequence[Axis]) -> Tensor:
    """Return the elements of all places of a result, [places], on the CPU."""
    ranges = {axis.along: axis.elements for axis in axes}
    return view_of(out, element, ranges, [axis.along for axis in axes]).reshape(-1).cpu()
