"""Weights of a vLLM model: packed forms that follow writes, and a number that changes with every update.

[Note: keys of older weights] A key that was computed before an update of the weights is not the key that the trainer
computes. vLLM keeps such keys in its prefix cache, and in requests that are running, until it is told to drop them. So
each block of the cache remembers the number of the weights that wrote it, and a request that would read a block of
another number is refused, with the call that drops them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError
from isobit.ops import dispatch
from isobit.ops.linear.op import linear_fp32, linear_with_packed
from isobit.ops.linear.packed import PackedWeight, Snapshot

# vLLM's weights are a subclass of Tensor whose every attribute runs Python; without it a step is faster.
PLAIN = torch._C.DisableTorchFunctionSubclass


class PackedLinear:
    """The packed form of one layer's weight, made at the first call and again after each write to the weight."""

    def __init__(self) -> None:
        self._packed: PackedWeight | None = None
        self._weight: Tensor | None = None
        self._earlier = 0  # writes that were counted for weights that this one replaced

    @property
    def is_packed(self) -> bool:
        """Whether there is a packed form; where memory has other owners there is none."""
        return self._packed is not None

    @property
    def nbytes(self) -> int:
        """Memory of the packed form in bytes."""
        return 0 if self._packed is None else self._packed.nbytes

    @property
    def writes(self) -> int:
        """How often the weight was written or replaced since it was packed first, as far as calls have seen."""
        if self._packed is None or self._weight is None:
            return self._earlier
        return self._earlier + self._packed.repacks + int(not self._packed.is_current(self._weight))

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias, with the packed form where memory allows one: the bits are the same."""
        with PLAIN():
            snapshot = self._current(weight)
            packed = None if snapshot is None else snapshot.packed
            return linear_with_packed(x, weight, bias, None, packed)

    def compute_fp32(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x · weightᵀ in fp32, before it is rounded."""
        with PLAIN():
            snapshot = self._current(weight)
            return linear_fp32(x, weight, None if snapshot is None else snapshot.packed)

    def drop(self) -> None:
        """Free the packed form before the weight is replaced; the next call makes it again."""
        self._earlier, self._packed = self.writes, None

    def _current(self, weight: Tensor) -> Snapshot | None:
        if self._weight is not weight:
            self._earlier = self.writes + int(self._weight is not None)
            self._weight, self._packed = weight, None
        if self._packed is None:
            if not dispatch.is_native(weight.dtype) or weight.is_meta:
                return None
            try:
                self._packed = PackedWeight(weight)
            except (
                ArgumentError
            ):  # memory that others own, whose writes would go unseen: read the weight itself
                return None
        return self._packed.current(weight)


class Generation:
    """The number of the weights: it grows when they are loaded, and when a packed one was written in place."""

    def __init__(self, packed: list[PackedLinear]) -> None:
        self._packed, self._loads = packed, 0

    def begin_update(self) -> None:
        """Count an update, and free packed forms, so that old and new weights are not both in memory."""
        self._loads += 1
        for layer in self._packed:
            layer.drop()

    @property
    def number(self) -> int:
        """A number that grows with every update that was seen."""
        return self._loads + sum(layer.writes for layer in self._packed)
