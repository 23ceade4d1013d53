"""Expressions behind names: where two of them differ, how one is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from isobit.certifying.names.names import CONSTANT, ONE_BIT, SIXTEEN
from isobit.order.addition import Branch

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
class ExpressionDifference:
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


def first_difference(left: Table, a: int, right: Table, b: int) -> ExpressionDifference | None:
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
    return ExpressionDifference(side(left, a), side(right, b), depth)


# The order of addition inside an expression, over the elements of one input row.

MOST_TERMS = 4096
ADDITIONS = ("add", "fma", "dot")
CHOOSING = ("max", "min")  # they add nothing, and a maximum over the row is no term


@dataclass(frozen=True)
class Part:
    """A branch with the number of its terms."""

    branch: Branch
    size: int


def sum_tree(table: Table, name: int, arguments: dict[str, tuple[int, ...]]) -> Branch | None:
    """Return the additions of an expression over one input, or None if it has no sum of moderate size.

    Args:
        table: the recorded operations.
        name: of the result.
        arguments: shapes of rows of the inputs that have rows, or of all inputs if none has.
    """
    counts = Counter(label for label, _ in inputs_under(table, name) if label in arguments)
    if not counts:
        return None
    label = counts.most_common(1)[0][0]
    shape = arguments[label]
    found = additions(
        table, name, lambda element: flat(element[1], shape) if element[0] == label else None
    )
    return found.branch if found is not None and found.size > 1 else None


def additions(table: Table, name: int, term: Callable[[Element], int | None]) -> Part | None:
    """Return the additions of an expression, or None if it has no term or more than `MOST_TERMS`.

    Products count as the term of their input; a division, a root or a scaling is passed through. Where two parts
    meet in another operation, the one with more terms is kept.

    Args:
        table: the recorded operations.
        name: of the result.
        term: gives the number of an input element, or None if it is no term (a weight, say).
    """
    done: dict[int, Part | None] = {}
    work = [name]
    while work:
        current = work[-1]
        if current in done:
            work.pop()
            continue
        element = table.element(current)
        node = None if element is not None else table.node(current)
        waiting = [] if node is None else [each for each in node.parts if each not in done]
        if waiting:
            work.extend(waiting)
            continue
        work.pop()
        if node is not None:
            done[current] = joined(node, done)
        else:
            number = None if element is None else term(element)
            done[current] = None if number is None else Part(number, 1)
        if (made := done[current]) is not None and made.size > MOST_TERMS:
            return None
    return done[name]


def flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the place of an element in its row."""
    place = 0
    for i, length in zip(index, shape, strict=False):
        place = place * length + i
    return place


def joined(node: Node, done: dict[int, Part | None]) -> Part | None:
    """Return what a node makes of the parts of its operands."""
    stem = node.operation.split(" ")[0].split(".")[0]
    operands = [done[each] for each in node.operands]
    if stem in CHOOSING:
        return None
    if node.products:
        operands += [largest([done[a], done[b]]) for a, b in node.products]
        return added(operands)
    if stem == "fma":
        return added([operands[2], largest(operands[:2])])
    if stem == "sub" and operands[0] is not None and operands[0].size == 1:
        return operands[0]  # a term less its row's mean or maximum
    if stem in ("add", "sub"):
        return added(operands)
    return largest(operands)


def added(parts: list[Part | None]) -> Part | None:
    """Return the addition of parts; constants and weights are left out."""
    kept = [part for part in parts if part is not None]
    if len(kept) < 2:
        return kept[0] if kept else None
    return Part(tuple(part.branch for part in kept), sum(part.size for part in kept))


def largest(parts: list[Part | None]) -> Part | None:
    """Return the part with the most terms."""
    kept = [part for part in parts if part is not None]
    return max(kept, key=lambda part: part.size, default=None)
