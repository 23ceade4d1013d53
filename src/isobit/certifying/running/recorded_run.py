"""The operations of one recorded execution, over all its launches, with inputs as the function's arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np

from isobit.certifying.judging.paths import short_path
from isobit.certifying.names.expressions import Element, Node, constant_text, describe
from isobit.certifying.records import Step
from isobit.certifying.running.compile import python_line
from isobit.certifying.running.execution import Execution
from isobit.certifying.running.storages import NamedView, Names

# Functions of one argument as Triton writes them.
FUNCTIONS = {
    "ex2": "exp2",
    "lg2": "log2",
    "rcp": "reciprocal",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "sin": "sin",
    "cos": "cos",
    "tanh": "tanh",
}
MOST_SHOWN = 3  # operands of a fused step that a text has


@dataclass
class Sorted:
    """The names of a view in ascending order, for looking up."""

    view: NamedView
    names: Names
    order: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass
class RecordedRun:
    """Answers what made a name: the table that `isobit.certifying.names.expressions` walks."""

    run: Execution
    sorted: list[Sorted] = field(default_factory=list)
    elements: dict[int, Element | None] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)  # name -> number of the launch

    def __post_init__(self) -> None:
        assert self.run.storages is not None
        for view in self.run.storages.named_views:
            order = np.argsort(view.names, kind="stable")
            self.sorted.append(Sorted(view, view.names[order], order))

    @property
    def complete(self) -> bool:
        """Whether every operation was kept."""
        recorded = [machine.recorded for machine, _ in self.run.machines]
        return all(each is not None and each.complete for each in recorded)

    def node(self, name: int) -> Node | None:
        """Return the operation that made a name, or None for an input: it is no operation to join its halves."""
        if self.element(name) is not None:
            return None
        for number, (machine, _) in enumerate(self.run.machines):
            assert machine.recorded is not None
            if (found := machine.recorded.node(name)) is not None:
                self.homes[name] = number
                return found
        return None

    def element(self, name: int) -> Element | None:
        """Return the argument and the index, without its row, of an input."""
        if name not in self.elements:
            self.elements[name] = self.find_element(name)
        return self.elements[name]

    def find_element(self, name: int) -> Element | None:
        """Look a name up among the inputs."""
        for each in self.sorted:
            at = int(np.searchsorted(each.names, np.uint64(name)))
            if at < each.names.size and int(each.names[at]) == name:
                index = np.unravel_index(int(each.order[at]), each.view.shape)
                axis = each.view.axis
                kept = [int(i) for i in index]
                if axis is not None:
                    inner = [] if axis.per_row == 1 else [kept[axis.axis] % axis.per_row]
                    kept[axis.axis : axis.axis + 1] = inner
                return each.view.argument, tuple(kept) or (0,)
        return None

    def place_of(self, node: Node) -> tuple[int, tuple[str, int] | None]:
        """Return the PTX line and the Python place of an operation."""
        machine, _ = self.run.machines[self.homes[node.name]]
        instruction = machine.program.instructions[node.instruction]
        return instruction.line, instruction.source

    def moment(self, node: Node) -> tuple[int, int, tuple[str, tuple[int, ...]]]:
        """Return when an operation is executed: launch, instruction, and its first input within a loop."""
        return self.homes[node.name], node.instruction, self.first_input(node)

    def first_input(self, node: Node, depth: int = 3) -> Element:
        """Return the smallest input within a few operations."""
        inputs = []
        for part in node.parts:
            if (found := self.element(part)) is not None:
                inputs.append(found)
            elif depth and (inner := self.node(part)) is not None:
                inputs.append(self.first_input(inner, depth - 1))
        return min(inputs, default=("~", (0,)))

    def step(self, name: int) -> Step:
        """Return the record of one operation."""
        text, node = self.formula(name), self.node(name)
        if node is None:
            return Step("value", text)
        machine, compiled = self.run.machines[self.homes[name]]
        instruction = machine.program.instructions[node.instruction]
        lines = compiled.ptx.splitlines()
        at = instruction.line
        ptx = lines[at - 1].strip() if 0 < at <= len(lines) else ""
        source = users_line(instruction.source, instruction.call_sites)
        short = (short_path(source[0]), source[1])
        return Step(instruction.opcode, text, at, ptx, short, python_line(source))

    def formula(self, name: int, depth: int = 2) -> str:
        """Return an expression as text, its outermost operations written out."""
        short = constant_text(name)
        node = None if short is not None else self.node(name)
        if short is None and node is None:
            short = describe(self, name)
        if short is not None:
            return short
        assert node is not None
        if not depth:
            return "…"
        parts = [self.formula(each, depth - 1) for each in node.operands]
        if node.products:
            shown = [
                f"{self.formula(a, 0)}·{self.formula(b, 0)}" for a, b in node.products[:MOST_SHOWN]
            ]
            more = len(node.products) - len(shown)
            inner = " + ".join([*shown, *([f"… {more} more"] if more else [])])
            return f"fused({' + '.join([*parts, inner])})"
        return written(node.operation.split(" ")[0], parts)


def users_line(
    source: tuple[str, int] | None, call_sites: tuple[tuple[str, int], ...]
) -> tuple[str, int]:
    """Return the innermost Python place that is not inside of Triton: where the user called `tl.sum`."""
    places = [place for place in (source, *call_sites) if place is not None]
    inside = f"{os.sep}triton{os.sep}"
    own = [place for place in places if inside not in place[0] or "site-packages" not in place[0]]
    return (own or places or [("", 0)])[0]


def written(operation: str, parts: list[str]) -> str:
    """Return one operation with its operands as text."""
    signs = {"add": " + ", "sub": " − ", "mul": "·", "div": " / "}
    stem = operation.split(".")[0]
    if stem in FUNCTIONS and len(parts) == 1:
        return f"{FUNCTIONS[stem]}({parts[0]})"
    if stem in signs and len(parts) == 2:
        return f"({signs[stem].join(parts)})"
    if stem == "fma" and len(parts) == 3:
        return f"fma({parts[0]}·{parts[1]} + {parts[2]})"
    return f"{operation}({', '.join(parts)})"
