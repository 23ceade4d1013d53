"""The balanced tree that merges segments, and what a share of it leaves for others to merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from isobit.order.plan import count_segments

Value = TypeVar("Value")


@dataclass(frozen=True, order=True)
class Node:
    """The subtree at `level` (0 is a segment), the `index`-th from the left on its level."""

    level: int
    index: int

    @property
    def first(self) -> int:
        """The first segment under this node."""
        return self.index << self.level

    @property
    def stop(self) -> int:
        """One past the last segment under this node."""
        return (self.index + 1) << self.level

    @property
    def parent(self) -> Node:
        """The node that this one is merged into."""
        return Node(self.level + 1, self.index // 2)

    def ancestor(self, siblings: int) -> Node:
        """The node over a run of `siblings` such nodes, a power of two of them."""
        generations = siblings.bit_length() - 1
        return Node(self.level + generations, self.index >> generations)

    def is_left_sibling_of(self, other: Node) -> bool:
        """Whether the tree adds these two, in this order."""
        return self.level == other.level and self.index + 1 == other.index and self.index % 2 == 0


def find_roots(first: int, stop: int) -> tuple[Node, ...]:
    """The largest subtrees that tile segments [first, stop): all that a share can merge by itself."""
    roots: list[Node] = []
    for segment in range(first, stop):
        roots.append(Node(0, segment))
        while len(roots) > 1 and roots[-2].is_left_sibling_of(roots[-1]):
            roots[-2:] = [roots[-1].parent]
    return tuple(roots)


class Counter(list[tuple[Node, Value]]):
    """A binary counter of partial sums: takes subtrees from left to right, holds at most one per level."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        super().__init__()
        self._add = add

    def push(self, node: Node, value: Value) -> None:
        """Takes the next subtree, and merges all that it completes."""
        self.append((node, value))
        while len(self) > 1 and self[-2][0].is_left_sibling_of(self[-1][0]):
            (_, left), (right_node, right) = self.pop(-2), self.pop()
            self.append((right_node.parent, self._add(left, right)))


def merge(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """All segments of a whole extent (a power of two of them) into one."""
    counter: Counter[Value] = Counter(add)
    for index, value in enumerate(values):
        counter.push(Node(0, index), value)
    ((_, total),) = counter
    return total


def merge_items(
    items: Sequence[Value], cap: int, add: Callable[[Value, Value], Value], of: int = 0
) -> Value:
    """Items that are each a sum of their own (heads, samples with heads): folded left in a segment, then merged.

    They are all items of their axis, or one subtree of its `of`.
    """
    extent = of or len(items)
    size = extent // count_segments(extent, 1, cap)
    return merge([reduce(add, items[at : at + size]) for at in range(0, len(items), size)], add)
