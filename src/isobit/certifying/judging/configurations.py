"""The configurations of a function: its row counts, what varies, and what its autotuned kernels may choose."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from isobit import bits
from isobit.certifying.judging.layouts import Layout, find_layouts, fixed_layout
from isobit.certifying.judging.row_axes import RowAxis, describe_shape, find_row_axis
from isobit.certifying.records import TensorRead
from isobit.certifying.running.capture import Choices
from isobit.certifying.running.execution import (
    Function,
    FunctionError,
    Pilot,
    View,
    call,
    name_of,
)
from isobit.certifying.running.storages import Placed
from isobit.certifying.running.watch import (
    CONSTANT,
    MOVES,
    ORDERLESS,
    OUTSIDE,
    RANDOM,
    UNINITIALISED,
    Elements,
    Known,
    Made,
)
from isobit.errors import ArgumentError, UnsupportedError

ROWS = (1, 3, 16, 64, 70, 130)
FAR = 131  # more rows than a tile has, so that an axis padded to whole tiles changes, too
# Operators whose results have the bits of what they are given.
COPIES = MOVES | CONSTANT | RANDOM | UNINITIALISED | {OUTSIDE}
ROUNDED = 16  # units in the last place of the largest value: as much may torch's results be off
CHAIN = 4  # operators behind a tensor that a message names
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
        name = getattr(function, "__name__", "function")
        given = ", ".join(f"{one}=…" for one in missing)
        raise ArgumentError(
            expected=f"defaults for the parameters of {name_of(function)}",
            received=f"none for {', '.join(missing)}",
            remedy="give them defaults, or values that vary; of tensors: write def certified(rows): return"
            f" {name}({given}), with torch.randn(rows, …) for the tensor of rows",
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
            remedy="such as rows=1,3,16,64",
        )
    return counts


@dataclass(frozen=True)
class Entry:
    """A view of a storage, as it is at any number of rows; `view` is the tensor at `rows`."""

    layout: Layout
    view: View
    rows: int
    place: str


@dataclass
class Surveyed:
    """What pilots found: for every configuration its tensors, and which axes of them count rows."""

    function: Function
    target: str
    plans: list[Planned]
    pilots: dict[Planned, Pilot] = field(default_factory=dict)
    partners: dict[Planned, list[Planned]] = field(default_factory=dict)
    expanded: list[Planned] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    labels: dict[tuple[Any, ...], str] = field(default_factory=dict)  # of autotuned kernels
    entries: dict[tuple[Settings, str], list[Entry]] = field(default_factory=dict)
    programs: dict[int | None, int] = field(
        default_factory=dict
    )  # by rows: what an execution costs

    def survey(self) -> Surveyed:
        """Run every configuration twice without executing; the second time, what the function caches is there."""
        for _ in range(2):
            self.pilots = {one: self.pilot(one) for one in self.plans}
            self.find_partners()
            self.known.settled = True
        self.expand(self.plans)
        return self

    def add(self, rows: Sequence[int]) -> None:
        """Add row counts to all settings."""
        settings = dict.fromkeys(one.settings for one in self.plans)
        new = [Planned(count, each) for each in settings for count in rows]
        self.plans += new
        self.pilots |= {one: self.pilot(one) for one in new}
        self.find_partners()
        self.expand(new)

    def expand(self, plans: Sequence[Planned]) -> None:
        """Add the choices of autotuned kernels to configurations."""
        for one in plans:
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

    def find_partners(self) -> None:
        """Run each setting with many more rows, twice: what changes shows which sizes and strides follow the rows."""
        most = max((one.rows or 0) for one in self.plans)
        for settings in dict.fromkeys(one.settings for one in self.plans):
            mine = [p for p in self.plans if p.settings == settings and p.rows is not None]
            if not mine:
                continue
            found = []
            for count in (most + FAR, most + 2 * FAR + 1):
                far = Planned(count, settings)
                if far not in self.pilots:
                    try:
                        self.pilots[far] = self.pilot(far)
                    except FunctionError:
                        if len({p.rows for p in mine}) == 1:
                            raise
                        continue
                found.append(far)
            found += sorted(mine, key=lambda p: -(p.rows or 0))
            for one in mine:
                self.partners[one] = found[:2]
        self.entries = {}

    def pilot(self, one: Planned) -> Pilot:
        """Run one configuration without executing its launches."""
        pilot = Pilot(known=self.known, choices=Choices(dict(one.autotune), labels=self.labels))
        call(self.function, one.given, pilot, self.target)
        if not pilot.launches:
            raise FunctionError(
                expected=f"{name_of(self.function)} to launch a Triton kernel",
                received="no launch",
                remedy="call kernel[grid](…) in it, and return what the kernel writes",
            )
        return pilot

    # ---- views ----------------------------------------------------------------------------------
    def entries_of(self, one: Planned, key: str) -> list[Entry]:
        """Return the views of a storage, as they are at any number of rows."""
        if (one.settings, key) not in self.entries:
            if one.rows is None:
                pairs = [(fixed_layout(v), v) for v in self.pilots[one.plain].views.get(key, ())]
                rows = 1
            else:
                first, second = self.partners[one.plain]
                assert first.rows is not None
                assert second.rows is not None
                views = [self.pilots[each].views.get(key, ()) for each in (first, second)]
                pairs = find_layouts(views[0], first.rows, views[1], second.rows)
                rows = first.rows
            several = len({(p.offset, p.stride) for p, _ in pairs}) > 1
            self.entries[one.settings, key] = [
                Entry(
                    layout,
                    view,
                    rows,
                    str(layout.offset)
                    + (f" by {', '.join(map(str, layout.stride))}" if several else ""),
                )
                for layout, view in pairs
            ]
        return self.entries[one.settings, key]

    def entry(self, one: Planned, key: str, tensor: torch.Tensor) -> Entry:
        """Return the view that a tensor is.

        Raises:
            UnsupportedError: If other row counts do not have that input.
        """
        rows = 1 if one.rows is None else one.rows
        place = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        found = self.entries_of(one, key)
        for each in found:
            if each.layout.dtype == tensor.dtype and each.layout.fits(rows, *place):
                return each
        raise self.stranger(one, key, tensor)

    def stranger(self, one: Planned, key: str, tensor: torch.Tensor) -> UnsupportedError:
        """Return the error for an input that other row counts do not have."""
        if one.rows is None:
            return UnsupportedError(
                expected="a function that passes the same tensors whenever it is called",
                received=f"a tensor {list(tensor.shape)} that it did not pass before",
                remedy="make inputs in the same way in every call",
            )
        mine, other = self.pilots[one.plain], self.partners[one.plain][0]
        its = self.pilots[other]
        texts = [view.argument for view in mine.views.get(key, ())]
        argument = texts[0] if texts else f"a tensor {list(tensor.shape)}"
        if key in its.views:
            shapes = [list(view.shape) for view in its.views[key] if view.argument == argument]
            there = f"{shapes[0]}" if shapes else "another view of its storage"
            return UnsupportedError(
                expected=f"{argument} to be one view of its storage at any number of rows",
                received=f"{list(tensor.shape)} at {one.rows} rows and {there} at {other.rows} rows",
                remedy="give rows an axis of their own, and use the same part of a tensor for any number of rows",
            )
        theirs = [k for k, views in its.views.items() if any(v.argument == argument for v in views)]
        return UnsupportedError(
            expected=f"{argument} to be the same tensor, made in the same way, at any number of rows",
            received=f"{origin(mine, key)} at {one.rows} rows and "
            f"{origin(its, theirs[0]) if theirs else 'none'} at {other.rows} rows",
            remedy="make inputs in the same way for any number of rows; what depends on the number of rows cannot be "
            "an input",
        )

    def place(self, one: Planned, key: str, tensor: torch.Tensor) -> Placed:
        """Return the axis of rows of a view of a storage, and where it is in the storage."""
        entry = self.entry(one, key, tensor)
        self.check_parts(one, key)
        if one.rows is None:
            return Placed(None, entry.place)
        axis = find_row_axis(
            entry.view.argument, tuple(tensor.shape), one.rows, entry.view.shape, entry.rows
        )
        if axis is not None and entry.layout.stride[axis.axis].at(entry.rows) == 0:
            axis = None  # one element for all rows
        return Placed(axis, entry.place)

    def check_parts(self, one: Planned, key: str) -> None:
        """Raise an error if torch changed or read a part of an input that does not follow the rows."""
        if one.rows is None:
            return
        for other in self.partners[one.plain]:  # two: a size of a weight may be one of their rows
            self.compare_parts(one, other, key)

    def compare_parts(self, one: Planned, other: Planned, key: str) -> None:
        """Raise an error if an input was made of another part of a tensor than at other rows."""
        assert one.rows is not None
        assert other.rows is not None
        mine, its = (
            None if watch is None else watch.history.get(key)
            for watch in (self.pilots[one.plain].watch, self.pilots[other].watch)
        )
        changed = [() if made is None else made.parts for made in (mine, its)]
        seen = [() if made is None else made.views for made in (mine, its)]
        if (
            len(changed[0]) != len(changed[1])
            or any(a != b and a * other.rows != b * one.rows for a, b in zip(*changed, strict=True))
            or not same_views(seen[0], one.rows, seen[1], other.rows)
        ):
            raise UnsupportedError(
                expected="torch to take the same part of every row of an input before the launch",
                received=f"another part at {one.rows} rows than at {other.rows} rows of a tensor "
                f"{origin(self.pilots[one.plain], key)}",
                remedy="prepare all rows alike",
            )

    def output_axes(self, one: Planned) -> list[RowAxis | None]:
        """Return the axis of rows of every output.

        Raises:
            UnsupportedError: If an output has none, though the function has rows.
        """
        outputs = self.pilots[one.plain].outputs
        if one.rows is None:
            return [None] * len(outputs)
        partner = self.partners[one.plain][0]
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

    # ---- values ---------------------------------------------------------------------------------
    @property
    def largest(self) -> Planned:
        """The configuration with the most rows."""
        return max(self.plans, key=lambda p: p.rows or 0)

    def twin(self, one: Planned, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what an input holds in the largest configuration, cut to the size of the tensor."""
        try:
            entry = self.entry(one, key, tensor)
            views = self.pilots[self.largest].views.get(key, ())
            same = [
                view.content
                for view in views
                if view.dtype == tensor.dtype
                and len(view.shape) == tensor.dim()
                and entry.layout.offset.at(self.largest.rows or 1) == view.offset
            ]
        except UnsupportedError:
            return None
        content = same[0] if same else None
        if content is None or any(a > b for a, b in zip(tensor.shape, content.shape, strict=True)):
            return None
        for axis, length in enumerate(tensor.shape):
            content = content.narrow(axis, 0, length)
        return content

    def fill(self, one: Planned, key: str, tensor: torch.Tensor) -> None:
        """Give floats the values of the largest configuration, to compare bits: torch's own may be an ulp off."""
        if not tensor.dtype.is_floating_point:
            return
        content = self.twin(one, key, tensor)
        overlaps = any(
            size > 1 and not stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if content is not None and not overlaps:
            tensor.detach().copy_(content)

    def made(self, one: Planned, key: str) -> Made | None:
        """Return how torch made a tensor of a configuration."""
        watch = self.pilots[one.plain].watch
        return None if watch is None else watch.history.get(key)

    def check_values(self, one: Planned) -> None:
        """Raise an error if an input holds something else in another configuration, or if torch combined rows.

        Elements with one name must have one value: of a row, the same at any number of rows.
        """
        self.check_combined(one)
        for key, views in self.pilots[one.plain].views.items():
            if "scratch" not in key.split()[:2]:
                self.check_parts(one, key)
                for view in views:
                    self.check_view(one, key, view)

    def check_view(self, one: Planned, key: str, view: View) -> None:
        """Raise an error if a view's values are others in another configuration."""
        assert view.content is not None
        axis = self.row_axis(one, key, view)
        floats = view.dtype.is_floating_point or view.dtype.is_complex
        floats = floats or getattr(self.made(one, key), "floats", False)
        if axis is None and not floats and not key.startswith("fresh"):
            return  # named by their values
        for other, its in self.same_views(one, key, view):
            assert its.content is not None
            mine, theirs = view.content, its.content
            if axis is not None and one.rows is not None and other.rows is not None:
                count = min(one.rows, other.rows)
                mine = mine.movedim(axis.axis, 0)[: count * axis.per_row]
                theirs = theirs.movedim(axis.axis, 0)[: count * axis.per_row]
            elif mine.shape != theirs.shape and not key.startswith("fresh"):
                continue  # it has no place at other row counts, as the execution says
            if mine.shape != theirs.shape or not self.same_values(one, key, mine, theirs):
                raise UnsupportedError(
                    expected=f"{view.argument} ({str(view.dtype).removeprefix('torch.')}) to hold the same values of a "
                    "row, or of what all rows share, in every configuration",
                    received=difference(mine, theirs, one, other, axis),
                    remedy="make them a function of the row (torch.arange(rows), torch.full), or draw them with "
                    "torch.randn or torch.randint; certify each choice of a schedule by --vary with a fixed value",
                )

    def same_views(self, one: Planned, key: str, view: View) -> Iterator[tuple[Planned, View]]:
        """Return the view in other configurations, also those that are not executed."""
        entry = self.entry_of_view(one, key, view)
        for other in (*self.plans, *self.partners.get(one.plain, ())):
            if entry is None or other == one.plain:
                continue
            for its in self.pilots[other].views.get(key, ()):
                same: Entry | None = entry
                if other.settings != one.settings:
                    same = self.entry_of_view(other, key, its)
                rows = 1 if other.rows is None else other.rows
                if same is None or same.place != entry.place or its.dtype != view.dtype:
                    continue
                if same.layout.fits(rows, its.shape, its.stride, its.offset):
                    yield other, its
                    break

    def same_values(self, one: Planned, key: str, mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        """Tell whether two tensors hold the same bits; what torch computed may be a few units in the last place off."""
        if bits.equal(mine.contiguous(), theirs.contiguous()):
            return True
        watch = self.pilots[one.plain].watch
        made = [] if watch is None else ancestors(key, watch.history)
        if all(each.operator in COPIES for each in made) or not mine.dtype.is_floating_point:
            return False
        unit = torch.finfo(mine.dtype).eps
        mine, theirs = mine.double(), theirs.double()  # fp8 has no comparisons
        largest = float(theirs.where(theirs.isfinite(), 0.0).abs().max())
        near = ROUNDED * unit * largest
        return torch.allclose(mine, theirs, rtol=0.0, atol=near, equal_nan=True)

    def entry_of_view(self, one: Planned, key: str, view: View) -> Entry | None:
        """Return what a view that a pilot saw is at any number of rows, or None if it follows no rule."""
        rows = 1 if one.rows is None else one.rows
        for entry in self.entries_of(one, key):
            if entry.layout.dtype == view.dtype and entry.layout.fits(
                rows, view.shape, view.stride, view.offset
            ):
                return entry
        return None

    def row_axis(self, one: Planned, key: str, view: View) -> RowAxis | None:
        """Return the axis of rows of a view that a pilot saw, or None if it has none or follows no rule."""
        entry = None if one.rows is None else self.entry_of_view(one, key, view)
        if entry is None or one.rows is None:
            return None
        try:
            return find_row_axis(view.argument, view.shape, one.rows, entry.view.shape, entry.rows)
        except UnsupportedError:
            return None

    def row_integers(self, one: Planned) -> bool:
        """Tell whether rows have integers: names do not show which row an integer is of."""
        return any(
            not view.dtype.is_floating_point
            and "scratch" not in key.split()[:2]
            and not getattr(self.made(one, key), "floats", False)
            and self.row_axis(one, key, view) is not None
            for key, views in self.pilots[one.plain].views.items()
            for view in views
        )

    def check_combined(self, one: Planned) -> None:
        """Raise an error if an input, or a value that went to Python, was computed by torch from several rows."""
        if one.rows is None:
            return
        other = self.partners[one.plain][0]
        pilot, watch, its = (
            self.pilots[one.plain],
            self.pilots[one.plain].watch,
            self.pilots[other].watch,
        )
        assert watch is not None
        assert its is not None
        shapes = {key: made.shape for key, made in its.history.items()}
        for key, views in pilot.views.items():
            if key in watch.history and (found := combining(key, watch.history, shapes)):
                raise UnsupportedError(
                    expected="inputs that torch does not compute from several rows, or by a sum whose order it chooses",
                    received=f"{views[0].argument} was computed by torch ({found.operator}) from a tensor with rows",
                    remedy="compute it in a kernel; or make it an input of its own: torch.rand, torch.randn",
                )
        for read in watch.host_reads:
            seen = ancestors(read.key, watch.history)
            if any(shapes.get(each.key) not in (None, each.shape) for each in seen):
                raise UnsupportedError(
                    expected="a wrapper whose choices do not depend on what a batch holds",
                    received=f"{read.operator} of a value that torch computed from a tensor with rows",
                    remedy="make the value a parameter of the function, and let it vary (--vary)",
                )
        if [r.value for r in watch.host_reads] != [r.value for r in its.host_reads]:
            raise UnsupportedError(
                expected="a wrapper that reads the same values of tensors at any number of rows",
                received=f"others at {one.rows} rows than at {other.rows} rows",
                remedy="make the value a parameter of the function, and let it vary (--vary)",
            )

    # ---- words ----------------------------------------------------------------------------------
    def tensors(self) -> tuple[TensorRead, ...]:
        """Describe how inputs and outputs are read, at the first configuration."""
        one = self.plans[0]
        found = []
        for key, views in self.pilots[one].views.items():
            if key.startswith("scratch"):
                continue
            view = views[0]
            axis = self.row_axis(one, key, view)
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


@dataclass(frozen=True)
class PlannedInputs:
    """The inputs of one configuration, for its execution."""

    surveyed: Surveyed
    planned: Planned

    def place(self, key: str, tensor: torch.Tensor) -> Placed:
        """Return the rows and the place of a view."""
        return self.surveyed.place(self.planned, key, tensor)

    def fill(self, key: str, tensor: torch.Tensor) -> None:
        """Give an input the values that it has in the largest configuration."""
        self.surveyed.fill(self.planned, key, tensor)

    def argument(self, key: str, tensor: torch.Tensor) -> str:
        """Return the parameter of a kernel that a view was first passed as."""
        return self.surveyed.entry(self.planned, key, tensor).view.argument.split(" of ")[0]


def origin(pilot: Pilot, key: str) -> str:
    """Return how a tensor was made, for messages."""
    made = None if pilot.watch is None else pilot.watch.history.get(key)
    if made is None or pilot.watch is None:
        return f"the tensor {key}"
    steps, shown = [made.says if made.parents else made.operator], made
    while shown.parents and shown.parents[0] in pilot.watch.history and len(steps) < CHAIN:
        shown = pilot.watch.history[shown.parents[0]]
        steps.append(shown.says if shown.parents else shown.operator)
    return f"made by {' of '.join(steps)}"


def difference(
    mine: torch.Tensor, theirs: torch.Tensor, one: Planned, other: Planned, axis: RowAxis | None
) -> str:
    """Return the first row whose values differ, for messages."""
    if mine.shape != theirs.shape:
        return (
            f"{list(mine.shape)} at {one.rows} rows and {list(theirs.shape)} at {other.rows} rows"
        )
    if mine.dtype.is_floating_point:
        mine, theirs = mine.double(), theirs.double()  # fp8 has no comparisons
    apart = (mine != theirs).reshape(len(mine) if mine.dim() else 1, -1).any(1).nonzero()
    at = int(apart[0]) if len(apart) else 0  # zeros of two signs are equal
    what = f"element {at}" if axis is None else f"row {at // axis.per_row}"
    a, b = ((t[at].reshape(-1)[:4].tolist() if t.dim() else t.item()) for t in (mine, theirs))
    where = [f"{p.rows} rows" + "".join(f" {n}={v}" for n, v in p.settings) for p in (one, other)]
    return f"{what} has {a} at {where[0]} and {b} at {where[1]}"


def combining(key: str, mine: dict[str, Made], shapes: dict[str, tuple[int, ...]]) -> Made | None:
    """Return the operator behind a tensor that combined elements of one whose shape follows the rows."""
    for made in ancestors(key, mine):
        grown = [
            p for p in made.parents if p in mine and shapes.get(p) not in (None, mine[p].shape)
        ]
        if made.pointwise or not grown:
            continue
        if made.operator in ORDERLESS and made.axes:
            # of one row: an axis that does not change with the rows
            parent = grown[0]
            here, there = mine[parent].shape, shapes[parent]
            changed = {at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b}
            if not changed & {axis % len(here) for axis in made.axes}:
                continue
        return made
    return None


def ancestors(key: str, mine: dict[str, Made]) -> list[Made]:
    """Return a tensor and everything that torch computed it from."""
    seen, work = dict[str, Made](), [key]
    while work:
        made = mine.get(work.pop())
        if made is not None and made.key not in seen:
            seen[made.key] = made
            work += made.parents
    return list(seen.values())


def same_views(mine: tuple[Elements, ...], rows: int, its: tuple[Elements, ...], many: int) -> bool:
    """Return whether torch read the same elements of every row, at `rows` rows and at `many`.

    With one row, a tensor whose rows were moved behind other axes is still in order and is not copied. So if one has
    more views than the other, those that only move rows are left out.
    """
    if len(mine) != len(its):
        mine = tuple(view for view in mine if not only_moves(view, rows))
        its = tuple(view for view in its if not only_moves(view, many))
    return len(mine) == len(its) and all(
        len(one[0]) == len(other[0]) and follows(one, rows, other, many)
        for one, other in zip(mine, its, strict=True)
    )


def follows(one: Elements, rows: int, other: Elements, many: int) -> bool:
    """Return whether sizes, strides and offset of two views are equal, or in the ratio of the rows.

    Strides and the offset may follow the rows only in a storage whose size does: elsewhere they are other elements. In
    a storage that has rows, a view that has none is of some rows: it would be read for all.
    """
    # The stride of an axis of one element says nothing.
    places = [
        (a, b)
        for a, b, m, n in zip(one[1], other[1], one[0], other[0], strict=True)
        if m != 1 and n != 1
    ]
    places.append((one[2], other[2]))
    pairs = [*zip(one[0], other[0], strict=True), *places]
    moves = any(a != b for a, b in places)
    has_rows = any(
        a != b and (x or y) for a, b, x, y in zip(one[0], other[0], one[1], other[1], strict=True)
    )
    grows = one[3] != other[3]
    return all(a == b or a * many == b * rows for a, b in pairs) and (
        has_rows if grows else not moves
    )


def only_moves(view: Elements, rows: int) -> bool:
    """Return whether the elements of each row are in the order in which they were, from its first one on."""
    shape, stride, offset, room = view
    kept = [size for size, length in zip(shape, stride, strict=True) if length and size > 1]
    if rows > 1 and math.prod(kept) != room and not any(size % rows == 0 for size in kept):
        return False  # some rows, not all
    inner = min(
        (length for size, length in zip(shape, stride, strict=True) if size == rows), default=0
    )
    step = 1
    for size, length in reversed(list(zip(shape, stride, strict=True))):
        if size in (1, rows):
            continue
        # Rows that are inside of an axis make its stride as many times as large.
        if length != step and not (inner and inner < length == step * rows):
            return False
        step *= size
    return offset == 0
