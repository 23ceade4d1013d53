"""The curves of a run's log, and how entries become curves: names, numbers, steps that were logged again.

[Note: memory of a log]
Of a curve HELD points are in memory, and the others in a temporary file of 16 bytes per point, which is smaller than
the log itself. Rules read curves from their first point to their last, some of them several times, and remember numbers
and no points. What a log can have any number of is counted, and the first of them are remembered: steps that a finding
names (STEPS_KEPT), places where steps go back, findings of `watch` (REPORTED_KEPT). So the memory that a log needs does
not depend on its length. The rule of missing steps counts intervals, and judges no log that has too many kinds of them.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, Any, overload

from blake3 import blake3

from isobit.errors import ArgumentError
from isobit.foundation.plain_text import one_line

NAMES = {
    "loss": (
        "loss",
        "train_loss",
        "train/loss",
        "training_loss",
        "lm loss",
        "train.loss",
        "isobit/loss",
    ),
    "grad_norm": (
        "grad_norm",
        "train/grad_norm",
        "grad.norm",
        "gradient_norm",
        "grad norm",
        "isobit/grad.norm",
    ),
    "lr": ("learning_rate", "lr", "train/learning_rate", "train/lr", "learning rate", "isobit/lr"),
}
STEPS = (
    "step",
    "global_step",
    "train/global_step",
    "iteration",
    "iter",
    "_step",
    "trainer/global_step",
)
WORDS = {
    "nan": math.nan,
    "inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
}
SEVERITIES = ("error", "warning", "info")
RULES_KEPT = 1000  # rules of findings of `watch`
KEYS_KEPT = 1000  # sets of keys for which the places of step and curves are remembered
OTHERS_KEPT = 200  # other keys that are remembered, to name those that may be meant
SHOWN = 8  # names of columns in a message
LARGEST_STEP = 2**63
MEAN_WINDOW = 100  # steps of the exponential mean
RATES_KEPT = 1000  # rates of the exponential mean, by the steps between two points
HELD = 1 << 14  # points of a curve in memory
STEPS_KEPT = 10_000  # steps of one finding, and places where steps go back
REPORTED_KEPT = 10_000  # steps of the findings of `watch`, of all rules together
Point = tuple[int, float]
NO_POINT = (LARGEST_STEP, math.nan)  # after the last


class Curve(Sequence[Point]):
    """Points (step, value) in the order of a log; see [Note: memory of a log].

    Example:
        >>> curve = Curve([(0, 2.0), (1, 1.5)])
        >>> curve.append(2, 1.25)
        >>> len(curve), curve[-1]
        (3, (2, 1.25))
    """

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self.steps, self.values = array("q"), array("d")  # the last points
        self.block = HELD  # points that are stored together: their steps, then their values
        self.stored = 0  # points in the file
        self.file: IO[bytes] | None = None
        for step, value in points:
            self.append(step, value)

    def append(self, step: int, value: float) -> None:
        """Add a point."""
        if len(self.steps) == self.block:
            self.store()
        self.steps.append(step)
        self.values.append(value)

    def store(self) -> None:
        """Move what is in memory to the file."""
        if self.file is None:
            self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            weakref.finalize(self, self.file.close)
        data = memoryview(self.steps.tobytes() + self.values.tobytes())
        at = 16 * self.stored
        while data:
            count = os.pwrite(self.file.fileno(), data, at)
            data, at = data[count:], at + count
        self.stored += len(self.steps)
        self.steps, self.values = array("q"), array("d")

    def block_at(self, start: int) -> tuple[array[int], array[float]]:
        """Read the block that begins with the point `start`."""
        assert self.file is not None
        data = os.pread(self.file.fileno(), 16 * self.block, 16 * start)
        if len(data) != 16 * self.block:
            raise OSError("a temporary file has been cut short")
        steps, values = array("q"), array("d")
        steps.frombytes(data[: 8 * self.block])
        values.frombytes(data[8 * self.block :])
        return steps, values

    def blocks(self) -> Iterator[tuple[array[int], array[float]]]:
        """Yield steps and values, as many at a time as are held in memory."""
        for start in range(0, self.stored, self.block):
            yield self.block_at(start)
        yield self.steps, self.values

    def keep_below(self, step: int) -> None:
        """Remove the points from a step on; steps have to rise."""
        while self.stored and not (len(self.steps) and self.steps[0] < step):
            self.stored -= self.block
            self.steps, self.values = self.block_at(self.stored)
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]

    def __len__(self) -> int:
        return self.stored + len(self.steps)

    def __iter__(self) -> Iterator[Point]:
        for steps, values in self.blocks():
            yield from zip(steps, values, strict=True)

    @overload
    def __getitem__(self, at: int) -> Point: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Point]: ...
    def __getitem__(self, at: int | slice) -> Point | Sequence[Point]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        place = range(len(self))[at]
        if place >= self.stored:
            return self.steps[place - self.stored], self.values[place - self.stored]
        assert self.file is not None
        start = 16 * (place - place % self.block) + 8 * (place % self.block)
        found = (os.pread(self.file.fileno(), 8, start + gap) for gap in (0, 8 * self.block))
        return array("q", next(found))[0], array("d", next(found))[0]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"Curve of {len(self):,} points"


@dataclass(frozen=True)
class RunLog:
    """The curves of one log.

    Attributes:
        path: The file or folder.
        form: "jsonl", "csv", "events", "trainer_state", "text", "tensorboard" or "mlflow".
        curves: Points (step, value) in the order of the log, by "loss", "grad_norm" and "lr"; steps rise. Of steps
            that were logged again after a resume, the later entries.
        rows: Entries that were read.
        skipped: Entries that are not readable, or have none of the curves.
        numbered: Whether entries have a step; else they are counted.
        reported: Findings of `watch` that the log has, by rule.
        resumed: Where the steps of the loss go back: the last step before, and the step that follows it; the first of
            these places.
        resumes: How many such places there are.
        replaced: Entries of all curves that were logged again, and are not judged.
        worded: Numbers that were written as null or as a word such as NaN; they count as not finite.
        unreadable: Entries before the end that cannot be read, or whose step, loss, norm or rate is no number.
        unread_after: The last step before the first of these.
        cut: Entries at the end of a file that are not whole, as a killed run leaves them.
        unused: Numbers under a second name of a curve, by name; the name with the most entries is judged.
        config: The configuration that the log itself has, as MLflow's parameters.
        max_steps: The steps of the whole run, if the log has them.
        norm_like: Columns that may be a gradient norm by their name, if the log has none under a known name.
    """

    path: str
    form: str
    curves: Mapping[str, Curve]
    rows: int
    skipped: int
    numbered: bool
    reported: Mapping[str, Reported] = field(default_factory=dict)
    resumed: tuple[tuple[int, int], ...] = ()
    resumes: int = 0
    replaced: int = 0
    worded: int = 0
    unreadable: int = 0
    unread_after: int = 0
    cut: int = 0
    unused: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    max_steps: int | None = None
    norm_like: tuple[str, ...] = ()

    @cached_property
    def finite(self) -> Mapping[str, Curve]:
        """The points whose value is finite, by curve."""
        return {name: finite_points(curve) for name, curve in self.curves.items()}

    @cached_property
    def shown_loss(self) -> Curve:
        """The losses that are finite, without a zero that stands for one that was not.

        Such a zero is 0.0 at a step whose norm is not finite, or in a log where few losses are exactly 0.
        """
        finite = self.finite["loss"]
        zeros = losses = 0
        for _, value in last_of_steps(self.curves["loss"]):
            losses, zeros = losses + 1, zeros + (value == 0.0)
        if not zeros:
            return finite
        norms = last_of_steps(self.curves.get("grad_norm", ()))
        kept, (at, norm) = Curve(), next(norms, NO_POINT)
        for step, value in finite:
            while at < step:
                at, norm = next(norms, NO_POINT)
            is_beside = at == step and not math.isfinite(norm)
            if value != 0.0 or not (zeros < losses / 2 or is_beside):
                kept.append(step, value)
        return kept

    @cached_property
    def mean_loss(self) -> Curve:
        """The exponential mean of the losses that are finite, hidden zeros left out."""
        return exponential_mean(self.shown_loss)

    def digest(self) -> str:
        """Return a digest of everything that is judged."""
        total = blake3(repr(replace(self, curves={})).encode(errors="backslashreplace"))
        for name, curve in self.curves.items():
            total.update(name.encode())
            for block in curve.blocks():
                total.update(array("d", chain.from_iterable(zip(*block, strict=True))).tobytes())
        return total.hexdigest()


@dataclass
class Reported:
    """What `watch` reported of one rule.

    Attributes:
        step: The first step.
        message: Of that step.
        severity: The worst of all.
        steps: Different steps, the first of them.
        count: How many steps there are; those that are not remembered count each time.
    """

    step: int
    message: str
    severity: str
    steps: dict[int, None] = field(default_factory=dict)
    count: int = 0


@dataclass
class Rows:
    """Entries while they are read, one at a time: a long log is not kept whole.

    Attributes:
        columns: Names of columns by curve, or by "step", that count instead of the usual names; an empty one is none.
    """

    columns: Mapping[str, str] = field(default_factory=dict)

    points: defaultdict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))  # by name
    rows: int = 0
    skipped: int = 0
    worded: int = 0
    unreadable: int = 0
    unread_after: int = 0
    cut: int = 0
    last_step: int = 0
    numbered: bool = True
    has_events: bool = False  # of `watch`
    reported: dict[str, Reported] = field(default_factory=dict)
    reported_steps: int = 0  # of all rules
    places: dict[tuple[str, ...], tuple[list[str], list[str]]] = field(default_factory=dict)
    others: dict[str, None] = field(
        default_factory=dict
    )  # keys that are no curve, the first of them

    def __post_init__(self) -> None:
        self.names = {curve: self.names_of(curve, known) for curve, known in NAMES.items()}
        self.curve_of = {name: curve for curve, names in self.names.items() for name in names}
        self.steps = self.names_of("step", STEPS)

    def names_of(self, curve: str, known: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of columns that count as a curve."""
        if curve not in self.columns:
            return known
        return (self.columns[curve],) if self.columns[curve] else ()

    def add(self, entry: Any) -> None:
        """Take one entry."""
        if not isinstance(entry, dict):
            self.add_unreadable()
            return
        keys = tuple(entry)
        steps, names = self.places.get(keys) or self.find_places(keys)
        given = None
        for name in steps:
            given = entry[name]
            if given is not None:
                break
        if type(given) is int and -LARGEST_STEP < given < LARGEST_STEP:
            step = given
        elif given is None:
            step = self.rows
        else:
            count = number_of(given)
            if count is None or not abs(count) < LARGEST_STEP:
                self.add_unreadable()
                return
            step = int(count)
        self.rows += 1
        kind = entry.get("kind")
        if kind == "finding":  # of `watch`
            module, message = (str(entry.get(key, "")) for key in ("module", "message"))
            message = f"{module}: {message}" if module else message
            self.add_finding(step, str(entry.get("name")), message, entry.get("severity"))
            return
        if kind == "metric":
            self.has_events = True
            name = str(entry.get("name"))
            entry = {name: entry.get("value")}
            names = [name] if name in self.curve_of else []
            if not names and len(self.others) < OTHERS_KEPT:
                self.others[name] = None
        if not names:
            self.skipped += 1
            return
        self.numbered = self.numbered and given is not None
        is_read = True
        for name in names:
            value = entry[name]
            if type(value) is float:
                self.points[name].append(step, value)
            elif not self.add_word(name, step, value):
                is_read = False
        if not is_read:
            self.note_unreadable()
        self.last_step = step

    def add_word(self, name: str, step: int, value: Any) -> bool:
        """Take a number that is no float: an integer, null or a word; return False if it is no number."""
        number = number_of(value, missing=math.nan)
        if number is None:
            return False
        self.worded += not isinstance(value, int) and not math.isfinite(number)
        self.points[name].append(step, number)
        return True

    def add_finding(self, step: int, rule: str, message: str, severity: Any) -> None:
        """Take what `watch` reported; of too many rules, the last ones are one."""
        if severity not in SEVERITIES:
            severity = "error"
        if len(self.reported) >= RULES_KEPT and rule not in self.reported:
            rule = "others"
        found = self.reported.setdefault(rule, Reported(step, message, severity))
        found.severity = min(found.severity, severity, key=SEVERITIES.index)
        if step in found.steps:
            return
        found.count += 1
        if self.reported_steps < REPORTED_KEPT:
            found.steps[step] = None
            self.reported_steps += 1

    def find_places(self, keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Return which keys of an entry have its step and its curves; entries of one log have few sets of keys."""
        found = (
            [name for name in self.steps if name in keys],
            [name for name in self.curve_of if name in keys],
        )
        for key in keys:
            if len(self.others) >= OTHERS_KEPT:
                break
            if key not in self.curve_of and key not in self.steps:
                self.others[key] = None
        if len(self.places) < KEYS_KEPT:
            self.places[keys] = found
        return found

    def add_unreadable(self, is_cut: bool = False) -> None:
        """Count an entry that cannot be read; `is_cut` if it is at the end of its file, and not whole."""
        self.rows += 1
        if is_cut:
            self.cut += 1
            self.skipped += 1
        else:
            self.note_unreadable()

    def note_unreadable(self) -> None:
        """Count an entry of which something cannot be read."""
        if not self.unreadable:
            self.unread_after = self.last_step
        self.unreadable += 1
        self.skipped += 1

    @property
    def has_loss(self) -> bool:
        """Whether an entry has a loss."""
        return any(name in self.points for name in self.names["loss"])

    def as_log(self, path: Path, form: str, **more: Any) -> RunLog:
        """Return the log.

        Raises:
            ArgumentError: If no entry has a loss.
        """
        chosen: dict[str, str] = {}
        for curve, names in self.names.items():
            present = [name for name in names if name in self.points]
            if present:  # a Trainer ends its losses with one train_loss, the mean of the run
                chosen[curve] = max(present, key=lambda name: len(self.points[name]))
        found = {curve: self.points[name] for curve, name in chosen.items()}
        missing = [
            f"{curve}={name}"
            for curve, name in self.columns.items()
            if name and (curve not in found if curve != "step" else not self.numbered)
        ]
        shown = ", ".join(one_line(name)[:60] for name in list(self.others)[:SHOWN]) or "none"
        if missing:
            raise ArgumentError(
                expected=f"a log with the columns that --columns names: {', '.join(missing)}",
                received=f"{path}: {self.rows} entries, and none has them; other columns: {shown}",
                remedy="name columns as the log has them",
            )
        if "loss" not in found:
            raise ArgumentError(
                expected=f"a log with a loss, called one of {', '.join(self.names['loss']) or 'none'}",
                received=f"{path}: {self.rows} entries, and none has one; other columns: {shown}"
                + ("; the last entry is truncated" if self.cut else ""),
                remedy="pass the run's JSON lines or CSV, transformers' trainer_state.json, a folder of TensorBoard's "
                "event files, or a run of MLflow; if another column is the loss, --columns loss=NAME",
            )
        form = "events" if self.has_events else form
        settled_ones = {curve: settled(points, form == "events") for curve, points in found.items()}
        return RunLog(
            str(path),
            form,
            {curve: kept for curve, (kept, *_) in settled_ones.items()},
            self.rows,
            self.skipped,
            self.numbered,
            self.reported,
            *settled_ones["loss"][1:],
            sum(len(found[curve]) - len(kept) for curve, (kept, *_) in settled_ones.items()),
            self.worded,
            self.unreadable,
            self.unread_after,
            self.cut,
            {n: len(points) for n, points in self.points.items() if n not in chosen.values()},
            norm_like=() if "grad_norm" in {**found, **self.columns} else self.norm_like(),
            **more,
        )

    def norm_like(self) -> tuple[str, ...]:
        """Return the other columns whose name is that of a gradient norm, for a person."""
        words = [(key, key.lower()) for key in self.others]
        return tuple(key for key, low in words if "grad" in low and "norm" in low)[:SHOWN]


def last_of_steps(points: Iterable[Point]) -> Iterator[Point]:
    """Yield the last of each step's points."""
    before: Point | None = None
    for point in points:
        if before is not None and point[0] != before[0]:
            yield before
        before = point
    if before is not None:
        yield before


def finite_points(curve: Curve) -> Curve:
    """Return the points whose value is finite: the curve itself, if all are."""
    if all(all(map(math.isfinite, values)) for _, values in curve.blocks()):
        return curve
    return Curve(point for point in curve if math.isfinite(point[1]))


def exponential_mean(points: Sequence[Point], window: int = MEAN_WINDOW) -> Curve:
    """Return the exponential mean over a window of steps; a log of every tenth step weighs a point ten times."""
    out = Curve()
    mean = 0.0
    for (step, value), rate in zip(points, rates_of(points, window), strict=True):
        mean += rate * (value - mean)
        out.append(step, mean)
    return out


def rates_of(points: Sequence[Point], window: int = MEAN_WINDOW) -> Iterator[float]:
    """Yield the weight that each point has in the exponential mean when it is added; the first ones are averaged."""
    before = points[0][0] - 1 if points else 0
    rates: dict[int, float] = {}  # by the steps between two points
    for count, (step, _) in enumerate(points, 1):
        gap = step - before
        before = step
        rate = rates.get(gap)
        if rate is None:
            rate = 1 - (1 - 2 / (window + 1)) ** max(gap, 1)
            if len(rates) < RATES_KEPT:
                rates[gap] = rate
        least = 1 / count
        yield rate if rate > least else least


def settled(curve: Curve, several: bool) -> tuple[Curve, tuple[tuple[int, int], ...], int]:
    """Return the points that a resumed run did not log again, where steps go back, and in how many places.

    Args:
        curve: In the order of the log.
        several: Whether a step may have several entries: `watch` logs micro-batches one by one.
    """
    if rises(curve, several):
        return curve, (), 0
    kept, backs, count, last = Curve(), list[tuple[int, int]](), 0, -LARGEST_STEP
    for step, value in curve:
        if step < last or (step == last and not several):
            count += 1
            if len(backs) < STEPS_KEPT:
                backs.append((last, step))
            kept.keep_below(step)
        kept.append(step, value)
        last = step
    return kept, tuple(backs), count


def rises(curve: Curve, several: bool) -> bool:
    """Return whether steps never go back, nor stay unless a step may have `several` entries."""
    last = -LARGEST_STEP
    for steps, _ in curve.blocks():
        for step in steps:
            if step < last or (step == last and not several):
                return False
            last = step
    return True


def number_of(value: Any, missing: float | None = None) -> float | None:
    """Return a number from JSON or CSV, None if it is not one. JSON's null is `missing`: pandas writes NaN so."""
    if value is None:
        return missing
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        word = value.strip().lower()
        if word in WORDS:
            return WORDS[word]
        try:
            return float(word)
        except ValueError:
            return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
