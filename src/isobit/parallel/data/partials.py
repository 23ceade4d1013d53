"""The gradients of a step that is not yet whole: a binary counter of unrounded partials for each parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from isobit.errors import CutError
from isobit.ops.share import accumulation_dtype
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives.additions import add_into


class Partials:
    """For each key at most one partial a level of the sample tree; the left one takes the right one in, in place."""

    def __init__(self, keys: Iterable[Tensor]) -> None:
        self._counters: dict[Tensor, Counter[Tensor]] = {key: Counter(add_into) for key in keys}
        self._given: set[Tensor] = set()
        self.peak_bytes = 0

    def push(self, key: Tensor, node: Node, value: Tensor) -> None:
        """The next subtree, from left to right. The value becomes the counter's own, and is written to."""
        self._given.add(key)
        self._counters[key].push(node, value)

    def complete(self, node: Node) -> list[Tensor]:
        """Ends a subtree: +0.0 for each key that was given nothing of it, since an absent contribution is added too."""
        absent = [key for key in self._counters if key not in self._given]
        for key in absent:
            self.push(
                key,
                node,
                torch.zeros(key.shape, dtype=accumulation_dtype(key.dtype), device=key.device),
            )
        self._given.clear()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return absent

    def take(self, key: Tensor, node: Node) -> Tensor:
        """The whole of this subtree, which leaves the counter."""
        counter = self._counters[key]
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
        """Memory of the partials held now."""
        return sum(value.nbytes for counter in self._counters.values() for _, value in counter)

    def clear(self) -> None:
        """Drops all of them: the step was given up."""
        self._given.clear()
        for counter in self._counters.values():
            counter.clear()
