"""Choose the sum of a recorded call that is revealed: through which input, in which result, at which element."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from isobit.auditing.orders.call_target import target_of_sum
from isobit.auditing.orders.found_sum import FoundSum, Index
from isobit.auditing.orders.probed_call import ProbedCall
from isobit.auditing.orders.probed_places import CallTarget
from isobit.auditing.orders.row_target import target_of_rows
from isobit.auditing.orders.sum_finder import SumFinder
from isobit.errors import RevealError

Row = int | tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How a sum was found, so that two calls are probed alike.

    Attributes:
        carrier: the flat position of the input that holds the terms.
        output: the index of the result.
        corner: 0 if the first element of a row is read, -1 if the last.
        rows: whether the sum is inside a function of rows.
        addend: the name of an input of which one entry is added to the sum.
        with_addend: whether that entry is one of the terms.
    """

    carrier: int
    output: int
    corner: int
    rows: bool = False
    addend: str = ""
    with_addend: bool = False


def make_target(call: ProbedCall, row: Row, way: Way | None) -> tuple[CallTarget, Way]:
    """Find a sum in the call and make a target of it.

    Args:
        call: the call.
        row: an index of the result's first dimension, or the whole index of an element.
        way: how the sum was found in the other call; None tries every input and result.

    Returns:
        The target, and how its sum was found.

    Raises:
        RevealError: There is no sum that can be probed.
    """
    if way is None or not way.rows:
        found = _find_sum(call, row, way)
        if found is not None:
            with_addend = way is not None and way.with_addend
            made = target_of_sum(call, found[0], with_addend=with_addend)
            return made, replace(found[1], with_addend=with_addend)
    outs = call.run()
    for carrier in (call.inputs if way is None else [way.carrier]) if outs else ():
        rows = target_of_rows(call, carrier, _element_of(row, tuple(outs[0].shape), 0))
        if rows is not None:
            return rows, Way(carrier, 0, 0, rows=True)
    raise RevealError(
        expected="a result that sums entries of an input",
        received=f"{call.name}, in which no element depends linearly on several of them, nor is made from the "
        "squares or the exponentials of a row",
        remedy="it has no order of addition that could be revealed",
    )


def _find_sum(call: ProbedCall, row: Row, way: Way | None) -> tuple[FoundSum, Way] | None:
    """Return the terms of an element; of its row's first or last element, whichever adds more."""
    shapes = [tuple(out.shape) for out in call.run()]
    for carrier, output in _carriers(call, shapes, way):
        best: tuple[FoundSum, Way] | None = None
        for corner in (0, -1) if way is None else (way.corner,):
            element = _element_of(row, shapes[output], corner)
            found = SumFinder(call, output, element).find(carrier)
            if found is not None and (best is None or found.n > best[0].n):
                best = found, Way(carrier, output, corner, addend=_addend_of(call, found))
            if isinstance(row, tuple) or (best is not None and best[0].whole):
                break
        if best is not None and best[0] is not found:  # the search for the other has set the inputs
            again = SumFinder(call, output, best[0].element).find(carrier)
            best = None if again is None else (again, best[1])
        if best is not None:
            return best
    return None


def _addend_of(call: ProbedCall, found: FoundSum) -> str:
    return "" if found.addend is None else call.name_of(found.addend.at) or "another input"


def _carriers(
    call: ProbedCall, shapes: list[tuple[int, ...]], way: Way | None
) -> Iterator[tuple[int, int]]:
    """Yield (input, result), the last input first: weights and values follow what they are multiplied with."""
    if way is not None:
        yield way.carrier, way.output
        return
    for output, shape in enumerate(shapes):
        if math.prod(shape):
            for carrier in reversed(call.inputs):
                yield carrier, output


def _element_of(row: Row, shape: tuple[int, ...], corner: int) -> Index:
    """Return the element that is read: as given, or the first or last one of a row."""
    if isinstance(row, tuple):
        given = (*row, *[0] * len(shape))[: len(shape)]
    else:
        given = (row, *(corner % size for size in shape[1:]))[: len(shape)]
    return tuple(min(at, size - 1) for at, size in zip(given, shape, strict=True))
