"""Expressions behind names: where two of them differ, how one is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from isobit.certifying.names.names import CONSTANT, ONE_BIT, SIXTEEN

LEAVES_SHOWN = 4096  # inputs that a description looks at

Element = tuple[str, tuple[int, ...]]  # label of a buffer and index in it


@dataclass(frozen=True)
class Node:
    """One operation; a fused step of a tensor core has `products` besides its accumulator."""

    name: int
    operation: str
    operands: tuple[int, ...]
    instruction: int
    products: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        """The names of everything that the operation takes."""
        return (*self.operands, *(part for pair in self.products for part in pair))


@dataclass(frozen=True)
class Side:
    """One of two operations that differ, in words."""

    operation: str
    operands: tuple[str, ...]
    ptx_line: int
    source: tuple[str, int] | None
    name: int


@dataclass(frozen=True)
class Difference:
    """The first place where two expressions differ, and how many equal operations lead to it."""

    left: Side
    right: Side
    depth: int


class Table(Protocol):
    """What is known about names."""

    def node(self, name: int) -> Node | None:
        """Return the operation that made a name."""

    def element(self, name: int) -> Element | None:
        """Return the input that a name stands for."""

    def place_of(self, node: Node) -> tuple[int, tuple[str, int] | None]:
        """Return the PTX line and the Python place of an operation."""


def constant_text(name: int) -> str | None:
    """Return a constant as text, or None for another name."""
    if not name & int(CONSTANT):
        return None
    value = name & 0xFFFFFFFF
    if name & int(ONE_BIT):
        return "true" if value & 1 else "false"
    if name & int(SIXTEEN):
        return f"0x{value & 0xFFFF:04X}"
    return repr(float(np.uint32(value).view(np.float32)))


def ranges(elements: Iterable[Element]) -> list[str]:
    """Return elements as ranges along the last axis, such as `x[0, 32:48]`.

    Example:
        >>> ranges([("x", (0, 2)), ("x", (0, 1)), ("w", (7,))])
        ['w[7]', 'x[0, 1:3]']
    """
    found = []
    ordered = sorted(set(elements))
    at = 0
    while at < len(ordered):
        label, index = ordered[at]
        count = 1
        while at + count < len(ordered) and ordered[at + count] == (
            label,
            (*index[:-1], index[-1] + count),
        ):
            count += 1
        last = str(index[-1]) if count == 1 else f"{index[-1]}:{index[-1] + count}"
        found.append(f"{label}[{', '.join([*map(str, index[:-1]), last])}]")
        at += count
    return found


def inputs_under(table: Table, name: int) -> list[Element]:
    """Return the inputs that an expression depends on, up to `LEAVES_SHOWN` operations."""
    seen, work, found = {name}, [name], []
    while work and len(seen) < LEAVES_SHOWN:
        current = work.pop()
        element = table.element(current)
        if element is not None:
            found.append(element)
            continue
        node = table.node(current)
        if node is None:
            continue
        for each in node.parts:
            if each not in seen:
                seen.add(each)
                work.append(each)
    return found


def describe(table: Table, name: int) -> str:
    """Return a name in words: an input, a constant, or an operation with the inputs under it."""
    text = constant_text(name)
    if text is not None:
        return text
    element = table.element(name)
    if element is not None:
        return ranges([element])[0]
    node = table.node(name)
    if node is None:
        return "a value that was not recorded"
    under = ranges(inputs_under(table, name))
    shown = ", ".join(under[:4]) + (", ..." if len(under) > 4 else "")
    return f"{node.operation} over {shown}" if under else node.operation


def side(table: Table, name: int) -> Side:
    """Return one operation in words."""
    node = table.node(name)
    if node is None:
        return Side("value", (describe(table, name),), 0, None, name)
    operands = [describe(table, each) for each in node.operands]
    if node.products:
        parts = [e for pair in node.products for e in (table.element(each) for each in pair) if e]
        operands.append("products of " + (", ".join(ranges(parts)) or "computed values"))
    line, source = table.place_of(node)
    return Side(node.operation, tuple(operands), line, source, name)


def first_difference(left: Table, a: int, right: Table, b: int) -> Difference | None:
    """Return the first place where two expressions differ, or None if the names are equal.

    Both are walked from the result toward the inputs, as long as the operations agree and exactly one
    operand differs; a chain is followed to its start, so that the place is the first in the order of
    execution.
    """
    depth = 0
    if a == b:
        return None
    while True:
        x, y = left.node(a), right.node(b)
        if x is None or y is None or x.operation != y.operation:
            break
        missing = list((Counter(x.operands) - Counter(y.operands)).elements())
        extra = list((Counter(y.operands) - Counter(x.operands)).elements())
        pairs = [
            (m, e)
            for m, e in zip(missing, extra, strict=False)
            if left.node(m) is not None and right.node(e) is not None
        ]
        if len(missing) != len(extra) or len(pairs) != len(missing) or not pairs:
            break
        a, b = pairs[0]
        depth += 1
    return Difference(side(left, a), side(right, b), depth)
