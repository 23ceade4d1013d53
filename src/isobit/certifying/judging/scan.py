"""Launches of many row counts, without executing them: does any launch something that was not judged?

[Note: the scan]
A certificate executes a few row counts. A wrapper may launch something else for others: another kernel from 32,768 rows
on, another number of warps or splits, a fixed grid when there are more rows than multiprocessors. A launch that is not
executed costs about a millisecond, so some sixty row counts are launched. Of each launch the scan compares what is
compiled (the kernel, its constants, its options, which sizes are 1 or divisible by 16), the grid, the numbers that are
passed, which tensors are passed and returned, and what small ones hold, if that is the same for all rows. Numbers may
follow the rows: as a constant, a multiple, or tiles of rows; a rule that fits the judged row counts must fit the
others. A tensor must be one that a judged row count has there ([Note: identity of inputs] in running/watch.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from isobit.certifying.judging.configurations import Planned, Surveyed, ancestors
from isobit.certifying.running.capture import Choices
from isobit.certifying.running.compile import Specialised, identity, specialise
from isobit.certifying.running.execution import Function, Pilot, call
from isobit.certifying.running.exposed import key_of
from isobit.certifying.running.watch import SMALL, held_by, storage_of
from isobit.errors import IsobitError

ROUNDS = 3  # scans: what the first finds may be executed, and then more may be known
ADDED = 2  # row counts that a scan adds
MOST = 1 << 16
SCANNED = tuple(
    sorted(
        {m for p in range(17) for m in (2**p - 1, 2**p, 2**p + 1) if 0 < m <= MOST}
        | {24, 48, 96, 100, 192, 200, 300, 384, 777, 1000, 1536, 5000, 10000, 20000, 40000, 60000}
    )
)
BYTES, SECONDS = 1 << 29, 4.0  # of tensors that a call may make, and of processor time for a scan
EXECUTED = 300  # rows; a launch of more is not executed without being asked for
TILES = np.arange(1, 2049)  # rows of a tile that a rule may have
RETURNED = "what the function returns"
PARTS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128])


@dataclass(frozen=True)
class Launch:
    """One launch: what is compiled, as texts, and the numbers and the tensors that are passed, by their names.

    What the function returns is like a launch behind the others.
    """

    kernel: str
    code: str
    says: str
    numbers: tuple[tuple[str, float], ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    contents: tuple[tuple[str, str], ...] = ()

    @property
    def whole(self) -> list[Any]:
        """All of it, as JSON has it."""
        parts = (self.numbers, self.tensors, self.contents)
        return [self.code, *([list(one) for one in part] for part in parts)]


@dataclass
class Scan(Pilot):
    """Receives launches, and notes what would be compiled."""

    target: str = ""
    found: list[Launch] = field(default_factory=list)
    programs: int = 0
    keeps: bool = False
    scratch: dict[str, int] = field(default_factory=dict)

    def launch(
        self, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Note one launch."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            made = specialise(kernel, self.target, arguments, named)
            size = grid(made.bound) if callable(grid) else grid
        size = (size,) if isinstance(size, int) else tuple(int(each) for each in size)
        numbers = [(f"the grid along {axis}", n) for axis, n in zip("xyz", size, strict=False)]
        numbers += [
            (name, value)
            for name, value in zip(made.names, made.arguments, strict=True)
            if isinstance(value, (int, float))
        ]
        given = {
            name: value
            for name, value in zip(made.names, made.arguments, strict=True)
            if isinstance(value, torch.Tensor)
        }
        places, tensors = self.seen(given)
        contents = tuple((n, held_by(t)) for n, t in given.items() if self.is_drawn(t))
        written = kernel.fn.__code__
        place = (written.co_filename, written.co_firstlineno, kernel.__name__)
        code = (*place, identity(kernel), *made.key)
        self.launches.append(kernel.__name__)
        self.programs += int(np.prod(size))
        self.found.append(
            Launch(
                kernel.__name__,
                repr(code),
                describe(made),
                tuple((n, float(v)) for n, v in [*numbers, *places]),
                tensors,
                contents,
            )
        )

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Tell whether a small tensor holds what it would if all random numbers were drawn."""
        assert self.watch is not None
        storage, watch = storage_of(tensor), self.watch
        of = watch.made.get(storage) or watch.known.kept.get(storage)
        made = [] if of is None else [of, *ancestors(of.key, watch.history)]
        if any(each.undrawn for each in made) or (of and of.key.startswith("scratch")):
            return False
        return 0 < tensor.numel() < SMALL

    def returned(self, outputs: Sequence[Any]) -> Launch:
        """Return which tensors the function returns."""
        tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
        given = {f"output {number}": one for number, one in enumerate(tensors)}
        numbers, keys = self.seen(given)
        return Launch(RETURNED, RETURNED, "", tuple((n, float(v)) for n, v in numbers), keys)

    def seen(
        self, given: dict[str, torch.Tensor]
    ) -> tuple[list[tuple[str, int]], tuple[tuple[str, str], ...]]:
        """Return where tensors are in their storages, and which storages these are."""
        assert self.watch is not None
        places, keys = list[tuple[str, int]](), list[tuple[str, str]]()
        for name, tensor in given.items():
            key = key_of(self.watch, tensor, name)
            if "scratch" in key.split()[:2]:  # some may be kept from an earlier call
                key = f"scratch {self.scratch.setdefault(key, len(self.scratch))}"
            key = key.removeprefix("kept ")
            if key.startswith("outside"):  # in which sequence they come says nothing
                key = f"outside {self.watch.content(tensor)}"
            keys.append((name, key))
            places.append((f"the offset of {name}", int(tensor.storage_offset())))
            places += [
                (f"stride {axis} of {name}", stride)
                for axis, (size, stride) in enumerate(
                    zip(tensor.shape, tensor.stride(), strict=True)
                )
                if size > 1
            ]
        return places, tuple(keys)


def describe(made: Specialised) -> str:
    """Return what is compiled, for messages: constants, options, and which sizes are divisible by 16."""
    names = list(made.signature)
    even = [names[path[0]] for path, facts in made.attributes.items() if facts]
    return made.describe() + (f" ({', '.join(even)} divisible by 16)" if even else "")


@dataclass(frozen=True)
class Unjudged:
    """Row counts that launch something that no judged row count launches."""

    rows: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        counts = f"{self.rows[0]:,} rows" if self.rows[0] != 1 else "1 row"
        more = f" and {len(self.rows) - 1} more of the row counts" if len(self.rows) > 1 else ""
        return f"at {counts}{more}, {self.what}"


@dataclass
class Scanned:
    """What a scan found.

    Attributes:
        counts: the row counts that were launched.
        unjudged: those that launch something else than the judged ones.
        unsettled: judged row counts that may launch something else.
        remarks: what else is not judged, such as a backward pass.
    """

    counts: list[int] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    unsettled: list[Unjudged] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class Rules:
    """The rules that a number may follow: constant, affine in rows, tiles of rows times a number.

    A number that was the same at several row counts must be that at all others, unless it may be one of tiles: many
    small batches have one.
    """

    def __init__(self, points: Sequence[tuple[int, float]], may_grow: bool = True) -> None:
        (first, value), (last, end) = points[0], points[-1]
        self.constant = value if all(v == value for _, v in points) else None
        self.has_tiles = may_grow or self.constant is None or len(points) == 1
        slope = (end - value) / (last - first) if last != first else 0.0
        self.affine = (value - slope * first, slope)
        if not all(self.affine[0] + slope * r == v for r, v in points) or slope != int(slope):
            self.affine = None if last != first else self.affine  # type: ignore[assignment]
        # number = times * ceil(rows * part / tile), where one row has one tile or some
        part, tile = (each.reshape(-1) for each in np.meshgrid(PARTS, TILES))
        at_first = -(-first * part // tile)
        times = value / at_first
        whole = times == np.floor(times)
        self.tiles = [each[whole] for each in (times, part, tile)]
        for rows, number in points:
            self.keep_tiles(rows, number)

    def keep_tiles(self, rows: int, number: float) -> bool:
        """Keep the tiles that fit a value; return whether there are any."""
        times, part, tile = self.tiles
        fits = times * -(-rows * part // tile) == number
        if fits.any():
            self.tiles = [each[fits] for each in self.tiles]
        return bool(fits.any())

    def fit(self, rows: int, number: float) -> bool:
        """Tell whether a value at another number of rows follows a rule."""
        affine = self.affine is not None and self.affine[0] + self.affine[1] * rows == number
        if self.constant == number or affine:
            return True
        return self.has_tiles and self.keep_tiles(rows, number)


def launched(
    surveyed: Surveyed, one: Planned, grad: bool = False, keeps: bool = False
) -> tuple[list[Launch], Scan, Any]:
    """Return the launches of a row count."""
    choices = Choices(dict(one.autotune), labels=surveyed.labels)
    scan = Scan(surveyed.known, choices=choices, target=surveyed.target, grad=grad, keeps=keeps)
    outputs = call(surveyed.function, one.given, scan, surveyed.target)
    tuned = [
        Launch(name, f"{name}: {text}", f"may be tuned to {text}")
        for name, texts in scan.choices.seen.items()
        for text in texts
    ]
    return [*scan.found, *tuned, scan.returned(outputs)], scan, outputs


def scan_rows(surveyed: Surveyed) -> Scanned:
    """Launch many row counts of every setting, and compare them with the judged ones."""
    scanned, began = Scanned(), time.process_time()
    settings = dict.fromkeys(one.settings for one in surveyed.plans if one.rows is not None)
    for each in settings:
        judged = sorted(
            {p.rows for p in surveyed.plans if p.settings == each and p.rows is not None}
        )
        try:
            scan_setting(surveyed, each, judged, scanned, began)
        except IsobitError:  # the judged configurations say what it is
            continue
    return scanned


def scan_setting(
    surveyed: Surveyed, settings: Any, judged: list[int], scanned: Scanned, began: float
) -> None:
    """Scan the row counts of one setting."""
    known = {}
    for rows in judged:
        surveyed.known.contents.clear()  # what is kept may hold something else now
        known[rows] = launched(surveyed, Planned(rows, settings))
    surveyed.programs |= {rows: scan.programs for rows, (_, scan, _) in known.items()}
    codes = {tuple(one.code for one in found) for found, _, _ in known.values()}
    single = {one.code for found, _, _ in known.values() for one in found}
    kernels = {one.kernel for found, _, _ in known.values() for one in found}
    rules = number_rules({rows: found for rows, (found, _, _) in known.items()})
    tensors: dict[tuple[int, str], set[str]] = {}
    for rows, (found, _, _) in known.items():
        for at, one in enumerate(found):
            for name, key in one.tensors:
                tensors.setdefault((at, name), set()).add(key)
                if len({each for each in tensors[at, name] if each.startswith("outside")}) > 1:
                    text = (
                        f"{name} of {one.kernel} is a tensor from outside that holds other values"
                    )
                    scanned.unsettled.append(Unjudged((rows,), text))
    contents = shared_contents([found for found, _, _ in known.values()])
    different: dict[str, list[int]] = {}
    watch = known[judged[-1]][1].watch
    size = 0.0 if watch is None else watch.bytes / judged[-1]
    for rows in SCANNED:
        if rows in judged:
            continue
        if size * rows > BYTES or time.process_time() - began > SECONDS:
            break
        try:
            found, _, _ = launched(surveyed, Planned(rows, settings))
        except IsobitError:
            continue  # it does not run, so nothing is claimed
        scanned.counts.append(rows)
        what = compare(found, codes, single, rules, kernels, rows)
        what = what or strangers(found, tensors) or other_contents(found, contents)
        if what:
            different.setdefault(what, []).append(rows)
    scanned.unjudged += [Unjudged(tuple(rows), what) for what, rows in different.items()]
    for rows in dict.fromkeys((judged[0], judged[-1])):
        look_at_gradients(surveyed, Planned(rows, settings), known[rows][0], scanned)


def number_rules(known: dict[int, list[Launch]]) -> dict[tuple[int, str], Rules]:
    """Return the rules of every number of every launch, by its place."""
    points: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for rows in sorted(known):
        for at, one in enumerate(known[rows]):
            for name, value in one.numbers:
                points.setdefault((at, name), []).append((rows, value))
    grids = {place for place in points if place[1].startswith("the grid")}
    # If an axis of a grid follows the rows, the others do not.
    grown = {at for at, name in grids if len({value for _, value in points[at, name]}) > 1}
    return {
        place: Rules(values, may_grow=place in grids and place[0] not in grown)
        for place, values in points.items()
    }


def compare(
    found: list[Launch],
    codes: set[tuple[str, ...]],
    single: set[str],
    rules: dict[tuple[int, str], Rules],
    kernels: set[str],
    rows: int,
) -> str:
    """Return what a row count launches that no judged one does, or ""."""
    new = [one for one in found if one.code not in single]
    if new:
        if new[0].kernel not in kernels:
            return f"{new[0].kernel} is launched, another kernel"
        return f"{new[0].kernel} is another binary: {new[0].says}"
    if tuple(one.code for one in found) not in codes:
        return f"{len(found) - 1} launches follow each other in another way"
    for at, one in enumerate(found):
        for name, value in one.numbers:
            rule = rules.get((at, name))
            if rule is not None and not rule.fit(rows, value):
                return f"{name} of {one.kernel} follows another rule ({value:g})"
    return ""


def strangers(found: list[Launch], tensors: dict[tuple[int, str], set[str]]) -> str:
    """Return which tensor of a row count no judged one has at this place, or ""."""
    for at, one in enumerate(found):
        for name, key in one.tensors:
            if key not in tensors.get((at, name), ()):
                what = name if one.kernel == RETURNED else f"{name} of {one.kernel}"
                return f"{what} is another tensor, or made in another way"
    return ""


def shared_contents(launches: list[list[Launch]]) -> dict[tuple[int, str], str]:
    """Return what tensors hold that hold the same at all judged row counts, by their place."""
    held: dict[tuple[int, str], list[str]] = {}
    for found in launches:
        for at, one in enumerate(found):
            for name, content in one.contents:
                held.setdefault((at, name), []).append(content)
    return {
        place: each[0]
        for place, each in held.items()
        if len(set(each)) == 1 < len(each) == len(launches)
    }


def other_contents(found: list[Launch], contents: dict[tuple[int, str], str]) -> str:
    """Return which tensor holds something else than at all judged row counts, or ""."""
    for at, one in enumerate(found):
        for name, content in one.contents:
            if contents.get((at, name), content) != content:
                return f"{name} of {one.kernel} holds other values"
    return ""


def look_at_gradients(
    surveyed: Surveyed, one: Planned, reference: list[Launch], scanned: Scanned
) -> None:
    """Compare with a call that records gradients: training may launch something else, and has a backward pass."""
    try:
        found, _, outputs = launched(surveyed, one, grad=True)
    except IsobitError:
        return
    if [each.code for each in found] != [each.code for each in reference]:
        new = [each for each in found if each.code not in {r.code for r in reference}]
        name = new[0].kernel if new else "something else"
        says = f" ({new[0].says})" if new else ""
        scanned.unsettled.append(
            Unjudged((one.rows or 1,), f"with gradients recorded, {name}{says} is launched")
        )
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in outputs):
        text = (
            "the backward pass was not judged: call it in the function, under torch.enable_grad(), and return the "
            "gradients"
        )
        if text not in scanned.remarks:
            scanned.remarks.append(text)


def scan_and_add(surveyed: Surveyed, add: bool) -> Scanned:
    """Scan, and let small row counts that launch something else be judged, if the rows are nobody's choice."""
    scanned = scan_rows(surveyed)
    for _ in range(ROUNDS):
        new = to_execute(scanned)[:ADDED] if add else []
        if not new:
            break
        surveyed.add(new)
        scanned = scan_rows(surveyed)
    return scanned


def to_execute(scanned: Scanned) -> list[int]:
    """Return row counts that are small enough to be judged: one for each thing that was not."""
    return sorted({min(rows) for one in scanned.unjudged if (rows := small(one.rows))})


def small(rows: Iterable[int]) -> list[int]:
    """Return row counts that can be executed."""
    return [each for each in rows if each <= EXECUTED]


# Launches of a row count that is called first, in a process of its own: a wrapper may keep what it chose.

FIRST_CALL_SECONDS = 60  # that the other process may take


def first_launches(
    function: Function, target: str, plans: Sequence[Planned]
) -> dict[int, list[Any]]:
    """Return what row counts launch if they are called from the largest to the smallest.

    A plan that is cached by the first call would otherwise be the one of the smallest row count in all calls. The
    calls are made in a copy of this process, so that they leave nothing behind. The copy has no other threads; if it
    waits for one, or fails, or there can be no copy, a row count has [], and there is no verdict.
    """
    settings = plans[0].settings if plans else ()
    counts = sorted({p.rows for p in plans if p.rows is not None and p.settings == settings})
    if len(counts) < 2:
        return {}
    if not hasattr(os, "fork"):
        return {rows: [] for rows in counts}
    reading, writing = os.pipe()
    with (
        warnings.catch_warnings()
    ):  # Python 3.12 warns if there are threads: the copy may wait for one
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        text = "{}"
        with contextlib.suppress(BaseException):
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            torch.set_num_threads(1)
            surveyed = Surveyed(function, target, [Planned(rows, settings) for rows in counts])
            for _ in range(2):  # the second time, what the function keeps is there
                found = {
                    rows: [
                        one.whole
                        for one in launched(surveyed, Planned(rows, settings), keeps=True)[0]
                    ]
                    for rows in reversed(counts)
                }
                surveyed.known.settled = True
            text = json.dumps(found)
        with contextlib.suppress(BaseException):
            os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    found = json.loads(read(reading, child))
    return {rows: found.get(str(rows), []) for rows in counts}


def read(reading: int, child: int) -> str:
    """Return what the other process wrote, "{}" if it takes too long."""
    parts = []
    while select.select([reading], [], [], FIRST_CALL_SECONDS)[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            break
        parts.append(part)
    else:
        os.kill(child, signal.SIGKILL)
        parts = []
    os.close(reading)
    os.waitpid(child, 0)
    return b"".join(parts).decode() or "{}"


def compare_first(surveyed: Surveyed, first: dict[int, list[Any]]) -> list[Unjudged]:
    """Return row counts that launch something else if they are called first."""
    settings = surveyed.plans[0].settings
    different = [
        rows
        for rows, codes in sorted(first.items())
        if not same_launches(
            codes, [one.whole for one in launched(surveyed, Planned(rows, settings))[0]]
        )
    ]
    if first and not any(first.values()):
        text = (
            "whether the function keeps what it chose in its first call could not be seen in a copy of this process; "
            "isobit certify sees it from the command line, in a process of its own"
        )
        return [Unjudged(tuple(sorted(first)), text)]
    what = "something else is launched if larger row counts are called before: the function keeps what it chose"
    return [Unjudged(tuple(different), what)] if different else []


def same_launches(first: list[Any], later: list[Any]) -> bool:
    """Tell whether launches are equal; of what tensors hold, what is known of both."""
    return len(first) == len(later) and all(
        a[:-1] == b[:-1] and all(dict(b[-1]).get(name, held) == held for name, held in a[-1])
        for a, b in zip(first, later, strict=True)
    )
