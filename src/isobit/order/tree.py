"""The balanced tree that merges segments, and the binary counter that computes it from left to right.

[Note: binary counter]
Partial sums arrive from left to right, as micro-batches do. The counter keeps at most one subtree per level, like the
digits of a binary number; a new subtree is added to its left sibling if that is there, and the result again. So after
n segments about log2(n) partial sums are kept, and the additions are those of the tree, whatever arrives together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from isobit.order.plan import count_segments

Value = TypeVar("Value")


@dataclass(frozen=True, order=True)
class Node:
    """A subtree: `level` 0 is a segment, `index` counts from the left on its level."""

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
        """The node that this one is added into."""
        return Node(self.level + 1, self.index // 2)

    def ancestor(self, siblings: int) -> Node:
        """Return the node over a run of `siblings` nodes such as this; `siblings` is a power of two."""
        generations = siblings.bit_length() - 1
        return Node(self.level + generations, self.index >> generations)

    def is_left_sibling_of(self, other: Node) -> bool:
        """Return whether the tree adds these two, in this order."""
        return self.level == other.level and self.index + 1 == other.index and self.index % 2 == 0


def find_roots(first: int, stop: int) -> tuple[Node, ...]:
    """Return the largest subtrees that tile segments [first, stop): what a share can merge by itself.

    Args:
        first: The first segment.
        stop: The segment after the last.

    Returns:
        The roots of the subtrees, from left to right.

    Example:
        >>> from isobit.order import find_roots
        >>> [root.level for root in find_roots(1, 4)]
        [0, 1]
    """
    roots: list[Node] = []
    for segment in range(first, stop):
        roots.append(Node(0, segment))
        while len(roots) > 1 and roots[-2].is_left_sibling_of(roots[-1]):
            roots[-2:] = [roots[-1].parent]
    return tuple(roots)


class Counter(list[tuple[Node, Value]]):
    """A binary counter of partial sums; see [Note: binary counter]."""

    def __init__(self, add: Callable[[Value, Value], Value]) -> None:
        super().__init__()
        self._add = add

    def push(self, node: Node, value: Value) -> None:
        """Take the next subtree, and merge every pair that it completes."""
        self.append((node, value))
        while len(self) > 1 and self[-2][0].is_left_sibling_of(self[-1][0]):
            (_, left), (right_node, right) = self.pop(-2), self.pop()
            self.append((right_node.parent, self._add(left, right)))


def merge(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Merge all segments of a whole extent, a power of two of them, into one value.

    Args:
        values: A value per segment.
        add: Adds two neighbours, the left one first.

    Returns:
        The value of the whole extent.

    Example:
        >>> from isobit.order import merge
        >>> merge(["a", "b", "c", "d"], lambda left, right: f"({left}+{right})")
        '((a+b)+(c+d))'
    """
    counter: Counter[Value] = Counter(add)
    for index, value in enumerate(values):
        counter.push(Node(0, index), value)
    ((_, total),) = counter
    return total


def merge_items(
    items: Sequence[Value], cap: int, add: Callable[[Value, Value], Value], of: int = 0
) -> Value:
    """Merge items that are sums themselves (heads, or samples of a norm over heads).

    Items are added from left to right within a segment, and segments by the tree. The items are one subtree of `of`
    items, or all of them if `of` is 0.
    """
    extent = of or len(items)
    size = extent // count_segments(extent, 1, cap)
    return merge([reduce(add, items[at : at + size]) for at in range(0, len(items), size)], add)
