"""`ProbedCall`: a call with fresh tensors of its own, whose values are chosen by probes.

The recorded values of floating-point tensors are neither read nor changed. Integers and booleans are
copied, since they decide which elements are added: indices, offsets of groups, masks. Integers of which
only the layout was kept are 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.auditing.replay.call import (
    Call,
    TensorSpec,
    flatten,
    operator_name,
    tensors_of,
    unflatten,
)
from isobit.errors import RevealError
from isobit.reveal.targets.tensor_target import TensorTarget

# Where the terms of one element of a result are; see [Note: how terms are found] in sum_finder.py.

Index = tuple[int, ...]


@dataclass(frozen=True)
class Addend:
    """An input of which the element adds one entry to the sum, such as a bias.

    Attributes:
        at: its flat position.
        entry: the entry.
        places: per dimension of the input, the dimension of the result that it moves along.
    """

    at: int
    entry: Index
    places: dict[int, int]


@dataclass(frozen=True)
class FoundSum:
    """The terms of one element of a result.

    Attributes:
        carrier: the flat position of the input that holds the terms.
        output: the index of the result among the floating-point results.
        element: the element that is read.
        first: one entry of the carrier that it adds.
        members: per summed dimension of the carrier, the indices that are added.
        places: per other dimension of the carrier, the dimension of the result that it moves along.
        whole: whether all entries of the summed dimensions are added.
        gain: the element's value if one term is 1.
        factor: flat position and dimension of the other factor of each term, if products are summed.
        addend: an input of which one entry is added too.
    """

    carrier: int
    output: int
    element: Index
    first: Index
    members: dict[int, Sequence[int]]
    places: dict[int, int]
    whole: bool
    gain: float
    factor: tuple[int, int] | None = None
    addend: Addend | None = None

    @property
    def n(self) -> int:
        """The number of terms."""
        return math.prod(len(indices) for indices in self.members.values())


ALIGNMENT = 64  # bytes: a fresh tensor begins where the recorded one does, modulo this


class OutOfTimeError(Exception):
    """The time for revealing has passed."""


class Clock:
    """Measure the calls of an operator, and end revealing when the time has passed."""

    def __init__(self, seconds: float) -> None:
        """Start to count."""
        self.seconds, self.start = seconds, time.perf_counter()
        self.calls, self.spent, self.fastest = 0, 0.0, float("inf")
        self.stage = "to find the terms"

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.perf_counter() - self.start)

    def add(self, seconds: float) -> None:
        """Count one call."""
        self.calls, self.spent = self.calls + 1, self.spent + seconds
        self.fastest = min(self.fastest, seconds)
        self.check()

    def check(self) -> None:
        """Raise OutOfTimeError if no time is left."""
        if self.left < 0:
            each = 1e3 * self.spent / max(self.calls, 1)
            raise OutOfTimeError(
                f"{self.calls} calls of {each:.2g} ms each were made, the last ones {self.stage}"
            )

    def expect(self, calls: int, what: str) -> None:
        """Raise OutOfTimeError if so many calls cannot be made in the time that is left."""
        needed = calls * (self.fastest if self.calls else 0.0)
        if needed > self.left:
            raise OutOfTimeError(
                f"{what} needs at least {calls} calls of {1e3 * self.fastest:.2g} ms each, "
                f"{needed:.3g} s, and {max(self.left, 0):.2g} s are left"
            )


class ProbedCall:
    """A call whose floating-point inputs are fresh tensors.

    Attributes:
        name: the operator, such as `aten::mm`.
        inputs: positions of the floating-point tensors among the flat arguments.
    """

    def __init__(self, call: Call, clock: Clock) -> None:
        """Make fresh tensors with the shapes, strides, dtypes, devices and alignment of the call's."""
        flat, self._spec = flatten(call.func, call.args, call.kwargs)
        self.name, self.func, self.clock = operator_name(call.func), call.func, clock
        self.flat = [make_fresh(value) for value in flat]
        self.inputs = [
            at
            for at, value in enumerate(self.flat)
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        self._written = self._find_written()
        self._names = self._find_names()

    def _arguments(self) -> list[tuple[Any, Any]]:
        args, kwargs = unflatten(self.func, self.flat, self._spec)
        schema = list(self.func._schema.arguments)
        found = list(zip(schema, args, strict=False))
        return found + [(one, kwargs[one.name]) for one in schema if one.name in kwargs]

    def _find_written(self) -> set[int]:
        """Return the flat positions of tensors that the operator declares to write to."""
        written = {
            id(tensor)
            for argument, value in self._arguments()
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_of(value)
        }
        return {at for at, value in enumerate(self.flat) if id(value) in written}

    def _find_names(self) -> dict[int, str]:
        """Return the argument's name of every flat position of a tensor."""
        names = {
            id(tensor): str(argument.name)
            for argument, value in self._arguments()
            for tensor in tensors_of(value)
        }
        return {at: names.get(id(self.flat[at]), "") for at in self.inputs}

    def name_of(self, at: int) -> str:
        """Return the name of the argument at a flat position."""
        return self._names[at]

    def writable(self, at: int) -> Tensor:
        """Return an input for writing: a dimension that repeats one element has size 1."""
        return without_repeats(self.flat[at])

    def fill(self, at: int, value: float) -> None:
        """Fill an input with one number."""
        self.writable(at).fill_(value)

    def run(self) -> list[Tensor]:
        """Call the operator; return its floating-point results, and the arguments that it has written to."""
        flat = list(self.flat)
        for at in self._written:
            flat[at] = copy_of(flat[at])
        args, kwargs = unflatten(self.func, flat, self._spec)
        start = time.perf_counter()
        try:
            out = self.func(*args, **kwargs)
        except Exception as error:
            raise RevealError(
                expected=f"{self.name} to accept chosen values at its recorded shapes",
                received=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                remedy="its order cannot be revealed through this call",
            ) from error
        found = [tensor for tensor in tensors_of(out) if tensor.is_floating_point()]
        known = {tensor.data_ptr() for tensor in found}
        found += [
            flat[at]
            for at in sorted(self._written.intersection(self.inputs))
            if flat[at].data_ptr() not in known
        ]
        self.clock.add(time.perf_counter() - start)
        return found

    def check_repeatable(self) -> None:
        """Check that the same random inputs give the same bits twice.

        Raises:
            RevealError: They do not.
        """
        for at in self.inputs:
            tensor = self.writable(at)
            drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(at))
            tensor.copy_(drawn.to(tensor.dtype))
        first, second = self.run(), self.run()
        if not all(_equal(a, b) for a, b in zip(first, second, strict=True)):
            raise RevealError(
                expected="the same bits for the same inputs",
                received=f"other bits from the second call of {self.name}",
                remedy="it is not repeatable, so it has no single order: fix threads, atomics or seeds first",
            )


def make_fresh(value: Any) -> Any:
    """Return a tensor of the same layout instead of a floating-point tensor; a copy of other tensors."""
    if isinstance(value, TensorSpec):
        value = value.empty()
        return _allocate(value)
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.detach().clone(memory_format=torch.preserve_format)
    return _allocate(value)


def copy_of(value: Tensor) -> Tensor:
    """Return a copy with the same strides and alignment."""
    made = _allocate(value)
    without_repeats(made).copy_(without_repeats(value))
    return made


def without_repeats(tensor: Tensor) -> Tensor:
    """Return the tensor with size 1 in each dimension that repeats one element (its stride is 0)."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _allocate(like: Tensor) -> Tensor:
    """Allocate zeros with the same layout; the address has the same remainder by ALIGNMENT."""
    extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    size, room = like.element_size(), ALIGNMENT // like.element_size()
    buffer = torch.zeros(max(extent, 0) + room, dtype=like.dtype, device=like.device)
    start = ((like.data_ptr() - buffer.data_ptr()) % ALIGNMENT) // size
    return buffer.as_strided(like.shape, like.stride(), start)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# Which elements of a result are probed in one call, and where their terms are.

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
