"""The curves of a run's log, and how entries become curves: names, numbers, steps that were logged again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.errors import ArgumentError

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
    "lr": ("learning_rate", "lr", "train/learning_rate", "train/lr", "learning rate"),
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
Point = tuple[int, float]


@dataclass(frozen=True)
class RunLog:
    """The curves of one log.

    Attributes:
        path: The file or folder.
        form: "jsonl", "csv", "events", "trainer_state", "tensorboard" or "mlflow".
        curves: Points (step, value) in the order of the log, by "loss", "grad_norm" and "lr". Of steps that were logged
            again after a resume, the later entries.
        rows: Entries that were read.
        skipped: Entries that are not readable, or have none of the curves.
        numbered: Whether entries have a step; else they are counted.
        reported: Findings of `watch` that the log has: (step, rule, message).
        resumed: Where the steps of the loss go back: the last step before, and the step that follows it.
        replaced: Entries of all curves that were logged again, and are not judged.
        worded: Numbers that were written as null or as a word such as NaN; they count as not finite.
        config: The configuration that the log itself has, as MLflow's parameters.
        max_steps: The steps of the whole run, if the log has them.
    """

    path: str
    form: str
    curves: Mapping[str, tuple[Point, ...]]
    rows: int
    skipped: int
    numbered: bool
    reported: tuple[tuple[int, str, str], ...] = ()
    resumed: tuple[tuple[int, int], ...] = ()
    replaced: int = 0
    worded: int = 0
    config: Mapping[str, Any] | None = None
    max_steps: int | None = None


@dataclass
class Rows:
    """Entries while they are read."""

    curves: dict[str, list[Point]] = field(default_factory=dict)
    rows: int = 0
    skipped: int = 0
    worded: int = 0
    numbered: bool = True
    has_events: bool = False  # of `watch`
    reported: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, entry: Any) -> None:
        """Take one entry."""
        self.rows += 1
        if not isinstance(entry, dict):
            self.skipped += 1
            return
        given = next((entry[name] for name in STEPS if entry.get(name) is not None), None)
        step = number_of(given)
        if step is None or not math.isfinite(step):
            self.numbered = self.numbered and given is not None
            step = self.rows - 1
        if entry.get("kind") == "finding":
            self.reported.append((int(step), str(entry.get("name")), str(entry.get("message", ""))))
            return
        if entry.get("kind") == "metric":  # an event of `watch`
            self.has_events = True
            entry = {str(entry.get("name")): entry.get("value")}
        found = False
        for curve, names in NAMES.items():
            name = next((name for name in names if name in entry), None)
            value = None if name is None else number_of(entry[name], missing=math.nan)
            if name is not None and value is not None:
                found = True
                self.worded += not isinstance(entry[name], int | float) and not math.isfinite(value)
                self.curves.setdefault(curve, []).append((int(step), value))
        self.skipped += not found

    def as_log(self, path: Path, form: str, lost: int = 0, **more: Any) -> RunLog:
        """Return the log; `lost` entries could not be read.

        Raises:
            ArgumentError: If no entry has a loss.
        """
        if not self.curves.get("loss"):
            raise ArgumentError(
                expected=f"a log with a loss, called one of {', '.join(NAMES['loss'])}",
                received=f"{path}: {self.rows} entries, and none has one",
                remedy="name a JSONL or CSV file of a run, transformers' trainer_state.json, a folder of TensorBoard's "
                "event files, or a run of MLflow",
            )
        form = "events" if self.has_events else form
        curves, replaced = {}, 0
        for name, points in self.curves.items():
            curves[name], _ = settled(points, form == "events")
            replaced += len(points) - len(curves[name])
        return RunLog(
            str(path),
            form,
            curves,
            self.rows + lost,
            self.skipped + lost,
            self.numbered,
            tuple(self.reported),
            settled(self.curves["loss"], form == "events")[1],
            replaced,
            self.worded,
            **more,
        )


def settled(
    points: Sequence[Point], several: bool
) -> tuple[tuple[Point, ...], tuple[tuple[int, int], ...]]:
    """Return the points that a resumed run did not log again, and where steps go back.

    Args:
        points: In the order of the log.
        several: Whether a step may have several entries: `watch` logs micro-batches one by one.
    """
    kept: list[Point] = []
    backs: list[tuple[int, int]] = []
    for point in points:
        if kept and (point[0] < kept[-1][0] or (point[0] == kept[-1][0] and not several)):
            backs.append((kept[-1][0], point[0]))
            while kept and kept[-1][0] >= point[0]:
                kept.pop()
        kept.append(point)
    return tuple(kept), tuple(backs)


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
