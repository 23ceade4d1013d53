"""One execution as rows: the names and bits of each output row, and which rows have the same integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from isobit.certifying.judging.row_axes import RowAxis, row_shape
from isobit.certifying.running.execution import Execution
from isobit.certifying.running.storages import Names

DIGEST = 32  # hexadecimal digits


@dataclass(frozen=True)
class Rows:
    """The outputs of one execution, row by row.

    Attributes:
        names: [rows, elements of all outputs].
        bits: bytes of each row.
        integers: digest of the integer inputs of each row: rows are comparable if they are equal.
        shapes: of each output, without its row axis: to say where an element is.
    """

    names: Names
    bits: list[bytes]
    integers: list[str]
    shapes: list[tuple[int, ...]]

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.bits)

    def digest(self, row: int) -> str:
        """Return the digest of a row's expression."""
        return blake3(np.ascontiguousarray(self.names[row]).tobytes()).hexdigest()[:DIGEST]

    def place(self, element: int) -> str:
        """Return the output and the index of an element of a row: "output 0, element [5]"."""
        for number, shape in enumerate(self.shapes):
            size = int(np.prod(shape, dtype=np.int64))
            if element < size:
                index = [int(i) for i in np.unravel_index(element, shape or (1,))]
                return f"output {number}, element {index}"
            element -= size
        return "no element"


def rows_of(
    run: Execution,
    shapes: Sequence[tuple[int, ...]],
    axes: Sequence[RowAxis | None],
    rows: int | None,
) -> Rows:
    """Cut the outputs of an execution into rows; without rows, everything is one row."""
    count = 1 if rows is None else rows
    named, bits, rest = [], [], list[tuple[int, ...]]()
    for names, raw, shape, axis in zip(run.names, run.bits, shapes, axes, strict=True):
        named.append(cut(names.reshape(shape), axis, count))
        width = raw.shape[1]
        bits.append(cut(raw.reshape(*shape, width), axis, count))
        rest.append(shape if axis is None else row_shape(shape, axis))
    integers = [blake3() for _ in range(count)]
    assert run.storages is not None
    for content in run.storages.integers:
        for row, value in enumerate(content):
            integers[row].update(len(value).to_bytes(8, "little") + value)
    joined = [b"".join(part[row].tobytes() for part in bits) for row in range(count)]
    return Rows(
        np.concatenate(named, axis=1),
        joined,
        [each.hexdigest()[:DIGEST] for each in integers],
        rest,
    )


def cut(values: Any, axis: RowAxis | None, count: int) -> Any:
    """Return values [rows, elements of a row]."""
    if axis is None:
        return values.reshape(1, -1)
    shape = values.shape
    split = (*shape[: axis.axis], count, axis.per_row, *shape[axis.axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(values.reshape(split), axis.axis, 0)).reshape(count, -1)
