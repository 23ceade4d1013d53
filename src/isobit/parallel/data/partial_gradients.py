"""Partial gradients of an unfinished step: one binary counter per parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives.elementwise_add import add_into


class PartialGradients:
    """Merges unrounded gradients of micro-batches along the sample tree.

    A counter has at most one partial gradient per level of the tree, so log2(micro-batches) + 1 in
    all. Two are merged by adding the right one to the left one in place.

    Args:
        parameters: The parameters whose gradients are pushed.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Make an empty counter for each parameter."""
        self._counters: dict[Tensor, Counter[Tensor]] = {p: Counter(add_into) for p in parameters}
        self._pushed: set[Tensor] = set()  # the parameters that have a gradient of this micro-batch
        self.peak_bytes = 0

    def push(self, parameter: Tensor, node: Node, value: Tensor) -> None:
        """Add the gradient of the next micro-batch; `value` is overwritten later."""
        self._pushed.add(parameter)
        self._counters[parameter].push(node, value)

    def complete(self, node: Node) -> list[Tensor]:
        """End a micro-batch: push +0.0 for parameters without a gradient, and return these.

        The zeros are added like any other value, since adding +0.0 may change the bits of -0.0.
        """
        absent = [p for p in self._counters if p not in self._pushed]
        for parameter in absent:
            dtype = accumulation_dtype(parameter.dtype)
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self.push(parameter, node, zeros)
        self._pushed.clear()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return absent

    def take(self, parameter: Tensor, node: Node) -> Tensor:
        """Remove and return the gradient of a whole subtree.

        Raises:
            CutError: The micro-batches pushed so far are not exactly this subtree.
        """
        counter = self._counters[parameter]
        held = [(n.first, n.stop) for n, _ in counter]
        if held != [(node.first, node.stop)]:
            raise CutError(
                expected=f"segments {node.first} to {node.stop}, each once",
                received=f"segments {held}",
                remedy="run every micro-batch of the step once, in order, each with one backward",
            )
        ((_, total),) = counter
        counter.clear()
        return total

    @property
    def held_bytes(self) -> int:
        """The memory of all partial gradients now."""
        return sum(value.nbytes for counter in self._counters.values() for _, value in counter)

    def clear(self) -> None:
        """Drop everything: the step was abandoned."""
        self._pushed.clear()
        for counter in self._counters.values():
            counter.clear()
