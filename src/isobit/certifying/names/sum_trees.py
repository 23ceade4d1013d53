"""The order of addition inside an expression, over the elements of one input row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from isobit.certifying.names.expressions import Element, Node, Table, inputs_under
from isobit.order.addition import Branch

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
