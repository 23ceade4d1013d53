"""Every operation of a run by the name of its result, so that expressions can be drawn.

Operations are kept as arrays, one chunk for each executed instruction; a matrix product keeps the
names of its two tiles and of its accumulator. The table is sorted when it is first asked. Above
`limit` bytes nothing more is kept, and `complete` is False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobit.certifying.names import expressions
from isobit.certifying.names import names as nm
from isobit.certifying.names.expressions import Element, ExpressionDifference, Node, additions
from isobit.certifying.names.names import Array, Names
from isobit.certifying.ptx.program import Instruction, Program
from isobit.errors import ArgumentError
from isobit.order.addition import Branch

LIMIT = 1 << 30


@dataclass
class Tile:
    """A matrix product: names of a [n, m, k], b [n, columns, k], c and the result [n, m, columns]."""

    a: Names
    b: Names
    c: Names
    operation: str
    products: int
    instruction: int


@dataclass
class Chunk:
    """Results of one operation and their operands, one row for each result."""

    operation: str
    operands: Array  # [results, operands]
    instruction: int


@dataclass
class Inputs:
    """A buffer of inputs: its label, its shape and the sorted names of its elements."""

    label: str
    shape: tuple[int, ...]
    sorted: Names
    order: Array


class Recorded:
    """The operations of one machine, over all its launches.

    Args:
        program: has the lines of instructions.
        limit: bytes after which nothing more is kept.
    """

    def __init__(self, program: Program, limit: int = LIMIT) -> None:
        self.program, self.limit, self.bytes = program, limit, 0
        self.chunks: list[Chunk | Tile] = []
        self.results: list[Names] = []
        self.inputs: dict[str, Inputs] = {}
        self.steps: dict[int, Node] = {}  # steps inside of a tile, made when they are asked for
        self.index: tuple[Names, Array, Array] | None = None

    @property
    def complete(self) -> bool:
        """Whether everything was kept."""
        return self.bytes <= self.limit

    # ---- keeping --------------------------------------------------------------------------------
    def add(
        self, operation: str, made: Names, operands: Sequence[Array], instruction: Instruction
    ) -> None:
        """Keep the results of an operation; constants are known by themselves."""
        found, first = np.unique(made, return_index=True)
        fresh = ~nm.is_constant(found)
        found, first = found[fresh], first[fresh]
        rows = np.stack([np.broadcast_to(each, made.shape)[first] for each in operands], -1)
        self.keep(Chunk(operation, rows, instruction.index), found, rows.nbytes)

    def add_tile(
        self,
        named: tuple[Names, Names, Names],
        made: Names,
        operation: str,
        products: int,
        instruction: Instruction,
    ) -> None:
        """Keep a matrix product: a [..., m, k], b [..., n, k], c and the result [..., m, n]."""
        a, b, c = (each.reshape(-1, *each.shape[-2:]) for each in named)
        tile = Tile(a, b, c, operation, products, instruction.index)
        self.keep(tile, made.reshape(-1), a.nbytes + b.nbytes + c.nbytes)

    def keep(self, chunk: Chunk | Tile, results: Names, size: int) -> None:
        """Keep one chunk, if there is room."""
        self.bytes += size + results.nbytes
        if self.complete and results.size:
            self.chunks.append(chunk)
            self.results.append(results)
            self.index = None

    def add_buffer(self, buffer: Any) -> None:
        """Keep the names of a buffer's elements as inputs, the first time it is seen."""
        if buffer.label in self.inputs or buffer.names is None:
            return
        made = buffer.element_names().reshape(-1)
        order = np.argsort(made, kind="stable")
        self.inputs[buffer.label] = Inputs(buffer.label, buffer.data.shape, made[order], order)

    # ---- asking ---------------------------------------------------------------------------------
    def node(self, name: int) -> Node | None:
        """Return the operation that made a name, or None for an input, a constant, or the unknown."""
        name = int(name)
        if name in self.steps:
            return self.steps[name]
        if self.index is None:
            sizes = [each.size for each in self.results]
            names = np.concatenate([*self.results, np.empty(0, np.uint64)])
            chunk = np.repeat(np.arange(len(sizes)), sizes)
            row = np.concatenate([*(np.arange(size) for size in sizes), np.empty(0, np.int64)])
            order = np.argsort(names, kind="stable")
            self.index = names[order], chunk[order], row[order].astype(np.int64)
        names, chunks, rows = self.index
        at = int(np.searchsorted(names, np.uint64(name)))
        if at >= names.size or int(names[at]) != name:
            return None
        found, number = self.chunks[int(chunks[at])], int(rows[at])
        if isinstance(found, Tile):
            return self.step_of(found, number, name)
        operands = tuple(int(each) for each in found.operands[number])
        return Node(name, found.operation, operands, found.instruction)

    def step_of(self, tile: Tile, row: int, name: int) -> Node:
        """Return the last fused step of a tile's element; the steps before it are kept."""
        n, m, column = np.unravel_index(row, tile.c.shape)
        a, b, c = tile.a[n, m], tile.b[n, column], tile.c[n, m, column]
        for k in range(0, a.size, tile.products):
            x, y = a[k : k + tile.products], b[k : k + tile.products]
            parts = zip(nm.powers(x), nm.powers(y), strict=True)
            sums = [np.einsum("k,k->", p, q) for p, q in parts]
            made = int(nm.make(tile.operation, *sums, c))
            pairs = tuple((int(p), int(q)) for p, q in zip(x, y, strict=True))
            self.steps[made] = Node(made, tile.operation, (int(c),), tile.instruction, pairs)
            c = np.uint64(made)
        return self.steps[name]

    def element(self, name: int) -> Element | None:
        """Return the buffer and the index of an input."""
        for each in self.inputs.values():
            at = int(np.searchsorted(each.sorted, np.uint64(name)))
            if at < each.sorted.size and int(each.sorted[at]) == int(name):
                index = np.unravel_index(int(each.order[at]), each.shape)
                return each.label, tuple(int(i) for i in index)
        return None

    def place_of(self, node: Node) -> tuple[int, tuple[str, int] | None]:
        """Return the PTX line and the Python place of an operation."""
        instruction = self.program.instructions[node.instruction]
        return instruction.line, instruction.source

    def describe(self, name: int) -> str:
        """Return a name in words."""
        return expressions.describe(self, int(name))

    def first_difference(
        self, name: int, other_name: int, other: Recorded | None = None
    ) -> ExpressionDifference | None:
        """Return the first place where two expressions differ; `other` has recorded the second."""
        return expressions.first_difference(self, int(name), other or self, int(other_name))

    def tree(self, name: int, terms: str) -> Branch:
        """Return the additions of an expression over the elements of one buffer.

        Args:
            name: of the result.
            terms: the label of the buffer whose elements are the terms, numbered along its last axis.

        Raises:
            ArgumentError: the expression has no term of that buffer.
        """

        def term(element: Element) -> int | None:
            return element[1][-1] if element[0] == terms else None

        found = additions(self, int(name), term)
        if found is None:
            raise ArgumentError(
                expected=f"an expression over elements of {terms}",
                received=self.describe(name),
                remedy=f"use one of {', '.join(self.inputs) or 'the recorded inputs'}",
            )
        return found.branch
