"""`ProbedCall`: a call with fresh tensors of its own, whose values are chosen by probes.

The recorded values of floating-point tensors are neither read nor changed. Integers and booleans are
copied, since they decide which elements are added: indices, offsets of groups, masks. Integers of which
only the layout was kept are 0.
"""

from __future__ import annotations

import time
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
