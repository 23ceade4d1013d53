"""Does a certificate hold for every row count? See [Note: every row count] in machine/row_paths.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from isobit.certifying.judging.configurations import Planned, PlannedInputs, Surveyed
from isobit.certifying.judging.scan import RETURNED, Launch, launched
from isobit.certifying.machine.machine import Machine
from isobit.certifying.machine.row_paths import (
    NotShownError,
    Number,
    RowPaths,
    RowTensor,
    Unknown,
    Value,
    constant,
)
from isobit.certifying.running.capture import Choices
from isobit.certifying.running.compile import Compiled, Compiler, Specialised
from isobit.certifying.running.execution import Execution, call
from isobit.certifying.running.watch import storage_of
from isobit.errors import IsobitError

EVEN = 16  # Triton compiles a program of its own for numbers that are multiples of it


@dataclass(frozen=True)
class EveryRowCount:
    """Whether other row counts that launch the same kernels have the same expression.

    Attributes:
        most: the largest row count that it was shown for; 0 if it was not shown.
        why: if it was not shown, what else than a row mask depends on the rows.
    """

    most: int = 0
    why: str = ""


def follow_rows(surveyed: Surveyed, compiler: Compiler) -> EveryRowCount:
    """Look at all kernels of all configurations, at the largest row count that each was judged with."""
    groups: dict[Any, list[Planned]] = {}
    for one in surveyed.expanded:
        if one.rows is not None:
            groups.setdefault((one.settings, one.autotune), []).append(one)
    if not groups or any(len(plans) < 2 for plans in groups.values()):
        return EveryRowCount(why="fewer than two row counts were judged")
    try:
        limits = [follow_setting(surveyed, compiler, plans) for plans in groups.values()]
    except NotShownError as error:
        return EveryRowCount(why=str(error))
    except IsobitError as error:
        return EveryRowCount(why=error.received)
    return EveryRowCount(min(limits))


def follow_setting(surveyed: Surveyed, compiler: Compiler, plans: list[Planned]) -> int:
    """Return the largest row count that was shown for one setting."""
    launches = {one: launched(surveyed, one)[0] for one in plans}
    for one in plans:
        # Not what may be tuned, and not what is returned.
        launches[one] = [each for each in launches[one] if each.numbers and each.kernel != RETURNED]
    largest: dict[tuple[str, ...], Planned] = {}
    for one in sorted(plans, key=lambda each: each.rows or 0):
        largest[tuple(each.code for each in launches[one])] = one
    limit = 0
    for codes, one in largest.items():
        if one.rows == 1 and len(largest) > 1:
            continue  # compiled for one row, and that was executed
        same = {p.rows: launches[p] for p in plans if p.rows is not None}
        same = {rows: found for rows, found in same.items() if len(found) == len(codes)}
        shown = follow_launches(surveyed, compiler, one, same)
        limit = shown if not limit else min(limit, shown)
    return limit


def follow_launches(
    surveyed: Surveyed, compiler: Compiler, one: Planned, launches: dict[int, list[Launch]]
) -> int:
    """Execute one row count, and watch what follows the rows in each of its launches."""
    assert one.rows is not None
    rows, paths = one.rows, list[RowPaths]()
    seen = list[Compiled]()

    def watch(machine: Machine, made: Compiled, given: Specialised) -> None:
        at = len(run.launched) - 1
        if len(seen) == at:  # a launch may be executed again
            seen.append(made)
            paths.append(path_of(surveyed, one, run, made, given, at, launches).follow())
        paths[at].watch(machine)

    run = Execution(
        compiler,
        PlannedInputs(surveyed, one),
        [0] * rows,
        known=surveyed.known,
        choices=Choices(dict(one.autotune), labels=surveyed.labels),
        look=watch,
    )
    call(surveyed.function, one.given, run, compiler.target)
    if not paths:
        raise NotShownError("nothing was launched")
    for each in paths:
        if each.per_program > rows:
            raise NotShownError(
                f"no tile of {each.per_program} rows was full at the row counts that were judged"
            )
        if each.masked and not each.checked:
            raise NotShownError("no access with a row mask was executed")
    return min(each.most_rows() for each in paths)


def path_of(
    surveyed: Surveyed,
    one: Planned,
    run: Execution,
    made: Compiled,
    given: Specialised,
    at: int,
    launches: dict[int, list[Launch]],
) -> RowPaths:
    """Return what is known of a launch: which of its tensors have rows, and which numbers follow them."""
    numbers: dict[str, dict[int, float]] = {}
    for rows, found in launches.items():
        for name, value in found[at].numbers:
            numbers.setdefault(name, {})[rows] = value
    grid = {axis: numbers.get(f"the grid along {axis}", {}).values() for axis in "xyz"}
    axes = [axis for axis, sizes in grid.items() if len(set(sizes)) > 1]
    if len(axes) != 1:
        raise NotShownError(
            f"{len(axes) or 'none'} of the grid's axes grow with the row counts that were judged"
        )
    arguments: dict[str, RowTensor | Value] = {}
    for parameter, name, value in zip(
        made.program.parameters, given.names, given.arguments, strict=False
    ):
        if isinstance(value, torch.Tensor):
            arguments[parameter.name] = tensor_rows(surveyed, one, run, value, name)
        elif isinstance(value, (int, float)):
            arguments[parameter.name] = number_of(value, numbers.get(name, {}), name)
        else:
            raise NotShownError(f"{name} is neither a tensor nor a number")
    names = list(given.signature)
    even = {names[path[0]] for path, facts in given.attributes.items() if facts}
    following = {
        n for n, by_rows in numbers.items() if n in names and len(set(by_rows.values())) > 1
    }
    multiple = EVEN if following and following <= even else 1
    assert one.rows is not None
    return RowPaths(made.program, arguments, axes[0], one.rows, multiple)


def number_of(value: float, by_rows: dict[int, float], name: str) -> Value:
    """Return what a number of a launch is: the same at all row counts, or a multiple of the rows."""
    if len(set(by_rows.values())) <= 1:
        if isinstance(value, bool) or not isinstance(value, int):
            return Number()
        return constant(value)
    factors = {found / rows for rows, found in by_rows.items()}
    factor = factors.pop()
    if not factors and factor == int(factor) and factor > 0 and isinstance(value, int):
        return replace(constant(0), rows=int(factor))
    return Unknown(f"{name}, which follows the rows in another way than a multiple")


def tensor_rows(
    surveyed: Surveyed, one: Planned, run: Execution, tensor: torch.Tensor, name: str
) -> RowTensor:
    """Return where the rows of a tensor are; they must be its outermost axis in memory."""
    if not tensor.dtype.is_floating_point:
        raise NotShownError(f"{name} has integers, which are taken as they are")
    assert run.storages is not None
    held = run.storages.held[storage_of(tensor)]
    axis = surveyed.place(one, held.key, tensor).axis
    if axis is None:
        return RowTensor()
    size = tensor.element_size()
    row_bytes = tensor.stride(axis.axis) * axis.per_row * size
    inner = sum(
        (length - 1) * abs(stride) * size
        for at, (length, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if at != axis.axis
    )
    inner += (axis.per_row - 1) * tensor.stride(axis.axis) * size + size
    if row_bytes < inner:
        raise NotShownError(f"rows of {name} are not apart from each other in memory")
    return RowTensor(row_bytes)
