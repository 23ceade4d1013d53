"""Find where the terms of one element of a result are, by changing inputs and looking at the result.

[Note: how terms are found]
One floating-point input carries the terms; the others are 1 where the carrier would have no influence
otherwise (the other factor of a product), and 0 elsewhere (a bias, the queries and keys of attention).
With 1 in a box of the carrier and 0 outside, the element shows how many of the box's entries it adds.
So halving a box finds one entry, and along each dimension the entries that are added with it; the
dimensions with more than one are summed over. Moving the entry along another dimension shows which
element of the result adds it there: such places are probed in the same call.

Nothing here has to be trusted: if the terms were found wrongly, revealing finds no tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from isobit.auditing.orders.probed_call import Addend, FoundSum, Index, ProbedCall

NEARLY = 0.02  # relative: a 16-bit result rounds a count by less than this

Box = list[range]


class SumFinder:
    """Search for the terms of one element of one result."""

    def __init__(self, call: ProbedCall, output: int, element: Index) -> None:
        """Read this element of this result."""
        self.call, self.output, self.element = call, output, element

    def read(self) -> Tensor:
        """Return the result."""
        return self.call.run()[self.output]

    def value(self) -> float:
        """Return the element."""
        return float(self.read()[self.element])

    def find(self, carrier: int) -> FoundSum | None:
        """Return the terms that this input carries; None if the element is no sum of its entries."""
        ones = self._set_others(carrier)
        if ones is None:
            return None
        tensor = self.call.writable(carrier)
        first = self._find_entry(tensor)
        if first is None:
            return None
        gain = self._probe(tensor, _box_at(first))
        twice, minus = (self._probe(tensor, _box_at(first), value) for value in (2.0, -1.0))
        if twice != 2 * gain or minus != -gain or not math.isfinite(gain):
            return None
        members = self._find_members(tensor, first, gain)
        if not members:
            return None
        places = self._find_places(tensor, first, members)
        whole = all(len(indices) == tensor.shape[dim] for dim, indices in members.items())
        found = FoundSum(carrier, self.output, self.element, first, members, places, whole, gain)
        factor = self._find_factor(found, ones) if gain == 1.0 and whole else None
        return replace(found, factor=factor, addend=self._find_addend(found, ones))

    def _set_others(self, carrier: int) -> list[int] | None:
        """Set the other inputs to 0 or 1; return those at 1, or None if the carrier has no influence."""
        call = self.call
        for at in call.inputs:
            call.fill(at, 1.0)
        if not self._has_influence(carrier):
            return None
        ones = []
        for at in call.inputs:
            if at != carrier:
                call.fill(at, 0.0)
                if not self._has_influence(carrier):
                    call.fill(at, 1.0)
                    ones.append(at)
        call.fill(carrier, 0.0)
        return ones if self.value() == 0 else None

    def _has_influence(self, carrier: int) -> bool:
        self.call.fill(carrier, 1.0)
        full = self.value()
        self.call.fill(carrier, 0.0)
        return math.isfinite(full) and full != self.value()

    def _probe(self, tensor: Tensor, box: Box, value: float = 1.0) -> float:
        """Return the element when a box of the tensor has this value, and the rest is 0."""
        view = tensor
        for dim, indices in enumerate(box):
            view = view.narrow(dim, indices.start, len(indices))
        view.fill_(value)
        found = self.value()
        view.zero_()
        return found

    def _find_entry(self, tensor: Tensor) -> Index | None:
        """Find one entry that has influence: likely ones first, then by halving."""
        for guess in self._guesses(tensor):
            if self._probe(tensor, _box_at(guess)) != 0:
                return guess
        box = [range(size) for size in tensor.shape]
        if self._probe(tensor, box) == 0:
            return None
        for dim in range(tensor.dim()):
            while len(box[dim]) > 1:
                whole = box[dim]
                box[dim] = whole[: len(whole) // 2]
                if self._probe(tensor, box) == 0:
                    box[dim] = whole[len(whole) // 2 :]
        return tuple(indices.start for indices in box)

    def _guesses(self, tensor: Tensor) -> list[Index]:
        dims, element = tensor.dim(), self.element or (0,)
        if not dims:
            return [()]
        zeros = [0] * dims
        guesses = [zeros, [element[0], *zeros[1:]], [*zeros[:-1], element[-1]]]
        if len(element) > 1:
            guesses.append([element[0], *zeros[2:], element[-1]][-dims:])
        if len(element) == dims:
            guesses += [list(element), [*element[:-2], 0, element[-1]][-dims:]]
        fitting = (
            tuple(min(at, size - 1) for at, size in zip(guess, tensor.shape, strict=True))
            for guess in guesses
            if len(guess) == dims
        )
        return list(dict.fromkeys(fitting))

    def _find_members(self, tensor: Tensor, first: Index, gain: float) -> dict[int, Sequence[int]]:
        """Return for each dimension that is summed over the indices that are added."""
        members: dict[int, Sequence[int]] = {}
        for dim, size in enumerate(tensor.shape):
            box = _box_at(first)
            box[dim] = range(size)
            count = self._probe(tensor, box) / gain if size > 1 else 1.0
            if abs(count - 1) < NEARLY:
                continue
            found = self._added(tensor, box, dim, gain, count)
            if len(found) > 1:
                members[dim] = _as_range(found)
        return members

    def _added(
        self, tensor: Tensor, box: Box, dim: int, gain: float, count: float | None = None
    ) -> list[int]:
        """Return the indices of a line of entries that are added, by halving."""
        line = box[dim]
        if count is None:
            count = self._probe(tensor, box) / gain
        if count == 0:
            return []
        if len(line) == 1:
            return list(line)
        ends = [_cut(box, dim, range(at, at + 1)) for at in (line[0], line[-1])]
        if abs(count - len(line)) <= NEARLY * len(line) and all(
            self._probe(tensor, end) != 0 for end in ends
        ):
            return list(line)
        half = len(line) // 2
        return [
            at
            for part in (line[:half], line[half:])
            for at in self._added(tensor, _cut(box, dim, part), dim, gain)
        ]

    def _find_places(
        self, tensor: Tensor, first: Index, members: dict[int, Sequence[int]]
    ) -> dict[int, int]:
        """Return for each other dimension the dimension of the result that it moves along, if it is one."""
        places: dict[int, int] = {}
        for dim, size in enumerate(tensor.shape):
            if dim in members or size == 1:
                continue
            step = 1 if first[dim] + 1 < size else -1
            moved = tensor[_moved(first, dim, step)]
            moved.fill_(1.0)
            out = self.read()
            moved.zero_()
            changed = [
                along
                for along, extent in enumerate(out.shape)
                if 0 <= self.element[along] + step < extent
                and float(out[_moved(self.element, along, step)]) != 0
            ]
            if len(changed) == 1 and changed[0] not in places.values():
                places[dim] = changed[0]
        return places

    def _find_addend(self, found: FoundSum, ones: list[int]) -> Addend | None:
        """Return an input of which the element adds one entry, weighted like the terms."""
        for at in self.call.inputs:
            if at == found.carrier or at in ones:
                continue
            tensor = self.call.writable(at)
            entry = self._find_entry(tensor)
            if entry is None or self._probe(tensor, _box_at(entry)) != found.gain:
                continue
            if not self._find_members(tensor, entry, found.gain):
                return Addend(at, entry, self._find_places(tensor, entry, {}))
        return None

    def _find_factor(self, found: FoundSum, ones: list[int]) -> tuple[int, int] | None:
        """Return the input, and its dimension, whose entries multiply the terms one by one."""
        if len(ones) != 1 or len(found.members) != 1:
            return None
        (dim,) = found.members
        terms, factors = self.call.writable(found.carrier), self.call.writable(ones[0])
        terms.fill_(1.0)
        factors.zero_()
        first = self._find_entry(factors)
        members = {} if first is None else self._find_members(factors, first, 1.0)
        terms.zero_()
        matched = first is not None and [len(m) for m in members.values()] == [found.n]
        along = next(iter(members), 0)
        if matched and first is not None:
            matched = all(
                self._meets(found, dim, here, factors, _at(first, along, there)) == (here == there)
                for here, there in ((0, 0), (1, 1), (found.n - 1, found.n - 1), (0, found.n - 1))
            )
        self.call.fill(ones[0], 1.0)
        return (ones[0], along) if matched else None

    def _meets(self, found: FoundSum, dim: int, here: int, factors: Tensor, there: Index) -> bool:
        """Return whether an entry of the carrier is multiplied by an entry of the other factor."""
        entry = self.call.writable(found.carrier)[_at(found.first, dim, here)]
        entry.fill_(1.0)
        met = self._probe(factors, _box_at(there)) != 0
        entry.zero_()
        return met


def _box_at(index: Index) -> Box:
    return [range(at, at + 1) for at in index]


def _cut(box: Box, dim: int, indices: range) -> Box:
    return [*box[:dim], indices, *box[dim + 1 :]]


def _at(index: Index, dim: int, value: int) -> Index:
    return (*index[:dim], value, *index[dim + 1 :])


def _moved(index: Index, dim: int, step: int) -> Index:
    return _at(index, dim, index[dim] + step)


def _as_range(indices: list[int]) -> Sequence[int]:
    whole = range(indices[0], indices[-1] + 1)
    return whole if len(whole) == len(indices) else indices
