"""The configurations of a function: its row counts, what varies, and what its autotuned kernels may choose."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isobit.certifying.judging.row_axes import RowAxis, describe_shape, find_row_axis
from isobit.certifying.records import TensorRead
from isobit.certifying.running.capture import Choices
from isobit.certifying.running.execution import Function, FunctionError, Pilot, call, name_of
from isobit.errors import ArgumentError, UnsupportedError

ROWS = (1, 3, 70, 130)
FAR = 131  # more rows than a tile has, so that an axis padded to whole tiles changes, too
Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Planned:
    """One configuration before it is run; values are those of Python."""

    rows: int | None
    settings: Settings
    autotune: tuple[tuple[str, str], ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the function."""
        return dict(self.settings) | ({} if self.rows is None else {"rows": self.rows})

    @property
    def plain(self) -> Planned:
        """The configuration without a choice for autotuned kernels."""
        return Planned(self.rows, self.settings)


def plan(
    function: Function, rows: Sequence[int] | None, vary: Mapping[str, Sequence[Any]]
) -> list[Planned]:
    """Return every combination of row counts and settings, the row counts of one setting together.

    Raises:
        ArgumentError: If the function has no such parameter, or needs one that nobody gives.
    """
    parameters = inspect.signature(function).parameters
    for name, values in vary.items():
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if name == "rows" or (name not in parameters and not takes_any):
            near = difflib.get_close_matches(name, [n for n in parameters if n != "rows"], 1)
            raise ArgumentError(
                expected=f"a parameter of {name_of(function)}: {', '.join(parameters) or 'it has none'}",
                received=name,
                remedy=f"did you mean {near[0]}?" if near else "use rows=… for row counts",
            )
        if not values:
            raise ArgumentError(
                expected=f"values of {name}", received="none", remedy=f"{name}=16,64"
            )
    counts = row_counts(function, "rows" in parameters, rows)
    missing = [
        name
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and name != "rows"
        and name not in vary
    ]
    if missing:
        raise ArgumentError(
            expected=f"defaults for the parameters of {name_of(function)}",
            received=f"none for {', '.join(missing)}",
            remedy="give them defaults, or values that vary",
        )
    combinations = itertools.product(*vary.values())
    settings = [tuple(zip(vary, values, strict=True)) for values in combinations]
    return [Planned(count, each) for each in settings for count in counts]


def row_counts(
    function: Function, has_rows: bool, rows: Sequence[int] | None
) -> tuple[int | None, ...]:
    """Check row counts; (None,) for a function without `rows`."""
    if not has_rows:
        if rows:
            raise ArgumentError(
                expected=f"a parameter rows of {name_of(function)}, since row counts are given",
                received="no such parameter",
                remedy="add rows=1 to its parameters, or leave row counts out",
            )
        return (None,)
    counts = tuple(dict.fromkeys(ROWS if rows is None else rows))
    if not counts or any(not isinstance(n, int) or n < 1 for n in counts):
        raise ArgumentError(
            expected="row counts of at least 1",
            received=str(counts),
            remedy="such as rows=1,3,70,130",
        )
    return counts


@dataclass
class Surveyed:
    """What pilots found: for every configuration its tensors, and which axes of them count rows."""

    function: Function
    target: str
    plans: list[Planned]
    pilots: dict[Planned, Pilot] = field(default_factory=dict)
    partners: dict[Planned, Planned] = field(default_factory=dict)
    expanded: list[Planned] = field(default_factory=list)

    def survey(self) -> Surveyed:
        """Run every configuration twice without executing; the second time, what the function caches is there."""
        for _ in range(2):
            self.pilots = {one: self.pilot(one) for one in self.plans}
            self.find_partners()
        for one in self.plans:
            seen = self.pilots[one].choices.seen
            choices: list[tuple[tuple[str, str], ...]] = []
            first = tuple((kernel, texts[0]) for kernel, texts in seen.items() if len(texts) > 1)
            for kernel, _ in first:
                # One kernel at a time: if each gives one expression, so does every combination.
                others = [pair for pair in first if pair[0] != kernel]
                choices += [tuple(sorted([*others, (kernel, text)])) for text in seen[kernel]]
            self.expanded += [
                Planned(one.rows, one.settings, each) for each in dict.fromkeys(choices or [()])
            ]
        return self

    def find_partners(self) -> None:
        """Run each setting with many more rows: the shapes that change show which axes count rows."""
        most = max((one.rows or 0) for one in self.plans)
        for one in self.plans:
            if one.rows is None:
                continue
            far = Planned(most + FAR, one.settings)
            others = [p for p in self.plans if p.settings == one.settings and p.rows != one.rows]
            if far not in self.pilots:
                try:
                    self.pilots[far] = self.pilot(far)
                except FunctionError:
                    if not others:
                        raise
            self.partners[one] = far if far in self.pilots else others[-1]

    def pilot(self, one: Planned) -> Pilot:
        """Run one configuration without executing its launches."""
        pilot = Pilot(choices=Choices(dict(one.autotune)))
        call(self.function, one.given, pilot, self.target)
        if not pilot.launches:
            raise FunctionError(
                expected=f"{name_of(self.function)} to launch a Triton kernel",
                received="no launch",
                remedy="call kernel[grid](…) in it, and return what the kernel writes",
            )
        return pilot

    def axis(self, one: Planned, key: str, number: int) -> RowAxis | None:
        """Return the axis of rows of a view of a storage."""
        if one.rows is None:
            return None
        partner = self.partners[one.plain]
        mine, other = self.pilots[one.plain].views, self.pilots[partner].views
        if number >= min(len(mine.get(key, ())), len(other.get(key, ()))):
            raise UnsupportedError(
                expected="the same tensors at any number of rows",
                received=f"{key}, view {number}, is there at {one.rows} rows only",
                remedy="make tensors in the same sequence for any number of rows",
            )
        view, its = mine[key][number], other[key][number]
        assert partner.rows is not None
        return find_row_axis(view.argument, view.shape, one.rows, its.shape, partner.rows)

    def argument(self, one: Planned, key: str, number: int) -> str:
        """Return the name of the kernel's parameter that a view was first passed as."""
        return self.pilots[one.plain].views[key][number].argument.split(" of ")[0]

    def output_axes(self, one: Planned) -> list[RowAxis | None]:
        """Return the axis of rows of every output.

        Raises:
            UnsupportedError: If an output has none, though the function has rows.
        """
        outputs = self.pilots[one.plain].outputs
        if one.rows is None:
            return [None] * len(outputs)
        partner = self.partners[one.plain]
        its = self.pilots[partner].outputs
        if len(outputs) != len(its):
            raise UnsupportedError(
                expected="as many outputs at any number of rows",
                received=f"{len(outputs)} and {len(its)}",
                remedy="return the same outputs",
            )
        assert partner.rows is not None
        found = list[RowAxis | None]()
        for number, ((shape, _), (other, _)) in enumerate(zip(outputs, its, strict=True)):
            axis = find_row_axis(f"output {number}", shape, one.rows, other, partner.rows)
            if axis is None:
                raise UnsupportedError(
                    expected=f"output {number} to have rows, as the function has a parameter rows",
                    received=f"{list(shape)} at {one.rows} and at {partner.rows} rows",
                    remedy="return outputs that have rows; certify one number over all rows by a "
                    "function without a parameter rows",
                )
            found.append(axis)
        return found

    def fill(self, key: str, number: int, tensor: torch.Tensor) -> None:
        """Give a float input the values that it has in the largest configuration, so that bits can be compared."""
        largest = max(self.plans, key=lambda p: p.rows or 0)
        views = self.pilots[largest].views.get(key, ())
        if number >= len(views) or not tensor.dtype.is_floating_point:
            return
        content = views[number].content
        if content is None or content.dtype != tensor.dtype or content.dim() != tensor.dim():
            return
        if all(a <= b for a, b in zip(tensor.shape, content.shape, strict=True)):
            for axis, length in enumerate(tensor.shape):
                content = content.narrow(axis, 0, length)
            if not any(
                size > 1 and not stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ):
                tensor.detach().copy_(content)

    def tensors(self) -> tuple[TensorRead, ...]:
        """Describe how inputs and outputs are read, at the first configuration."""
        one = self.plans[0]
        found = []
        for key, views in self.pilots[one].views.items():
            if key.startswith("scratch"):
                continue
            view = views[0]
            try:
                axis = self.axis(one, key, 0)
            except UnsupportedError:
                axis = None
            found.append(self.describe("input", view.argument, view.shape, axis, view.dtype))
        axes = self.output_axes(one)
        for number, (shape, dtype) in enumerate(self.pilots[one].outputs):
            found.append(self.describe("output", f"output {number}", shape, axes[number], dtype))
        return tuple(found)

    @staticmethod
    def describe(
        role: str, name: str, shape: tuple[int, ...], axis: RowAxis | None, dtype: torch.dtype
    ) -> TensorRead:
        """Return the record of one tensor."""
        return TensorRead(
            role,
            name,
            describe_shape(shape, axis),
            None if axis is None else axis.axis,
            1 if axis is None else axis.per_row,
            str(dtype).removeprefix("torch."),
        )
