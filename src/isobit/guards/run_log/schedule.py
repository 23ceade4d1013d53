"""Compare the learning rates of a log with the schedule that the configuration describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from isobit.guards.run_log.curves import Point, RunLog, number_of
from isobit.guards.run_log.findings import Limits, LogFinding, NotJudged

TOLERANCE = 0.01  # of the peak: logs round, and some to three digits
SHIFTS = (0, -1, 1)  # a step may be logged before or after its rate is set, or counted from 1
KINDS = ("constant", "constant_with_warmup", "linear", "cosine")
NAMES = {
    "kind": ("lr_scheduler_type", "lr_scheduler", "lr_schedule", "schedule", "scheduler"),
    "peak": ("learning_rate", "lr", "peak_lr", "max_lr"),
    "warmup": ("warmup_steps", "num_warmup_steps", "warmup_iters", "lr_warmup_iters"),
    "ratio": ("warmup_ratio", "lr_warmup_fraction"),
    "steps": ("max_steps", "total_steps", "num_training_steps", "train_iters", "training_steps"),
    "floor": ("min_lr",),
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate by step.

    Attributes:
        kind: "constant", "linear" or "cosine".
        peak: The rate after the warm-up.
        warmup: Steps over which it rises from 0.
        steps: Steps of the run, after which a linear or cosine one has reached `floor`.
        floor: The last rate.
    """

    kind: str
    peak: float
    warmup: int = 0
    steps: int = 0
    floor: float = 0.0

    def rate(self, step: int) -> float:
        """Return the rate at a step; the first is 0, and one before it has the rate of the first."""
        step = max(step, 0)
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.kind == "constant":
            return self.peak
        part = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        share = 1 - part if self.kind == "linear" else (1 + math.cos(math.pi * part)) / 2
        return self.floor + (self.peak - self.floor) * share

    def __str__(self) -> str:
        warm = f", {self.warmup} steps of warm-up" if self.warmup else ", no warm-up"
        return f"{self.kind}{warm}"


def find(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value with one of the names, of a nested configuration the outer one; None if there is none."""
    for name in names:
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            return config[name]
    inner = (find(each, names) for each in config.values() if isinstance(each, Mapping))
    return next((value for value in inner if value is not None), None)


def schedule_in(config: Mapping[str, Any], max_steps: int | None = None) -> Schedule:
    """Return the schedule that a configuration describes.

    Args:
        config: TrainingArguments as a dictionary, or a file of similar names.
        max_steps: The steps of the run, if the configuration counts epochs.

    Raises:
        NotJudged: If it describes none that is known here, with the reason.
    """
    kind = str(find(config, NAMES["kind"]) or "").lower().removeprefix("schedulertype.")
    if kind not in KINDS:
        said = f"{kind!r}, of {', '.join(KINDS)} that are known" if kind else "no lr_scheduler_type"
        raise NotJudged(f"the configuration has {said}")
    numbers = {name: number_of(find(config, NAMES[name])) for name in NAMES if name != "kind"}
    wrong = [
        name for name, value in numbers.items() if value is not None and not math.isfinite(value)
    ]
    if wrong or not (numbers["peak"] or 0) > 0:
        raise NotJudged(f"the configuration has no usable {wrong[0] if wrong else 'learning_rate'}")
    steps = int(numbers["steps"] or 0)
    steps = steps if steps > 0 else max_steps or 0
    warmup, ratio = numbers["warmup"] or 0.0, numbers["ratio"] or 0.0
    share = warmup if 0 < warmup < 1 else ratio if warmup <= 0 else 0.0
    if steps < 1 and (share or kind in ("linear", "cosine")):
        raise NotJudged("neither the configuration nor the log has max_steps")
    warm = math.ceil(steps * share) if share else max(int(warmup), 0)
    if kind == "constant":  # which transformers does not warm up
        warm = 0
    return Schedule(
        kind.removesuffix("_with_warmup"),
        numbers["peak"] or 0.0,
        warm,
        steps,
        numbers["floor"] or 0.0,
    )


def misses(
    schedule: Schedule, points: Sequence[Point], shift: int
) -> list[tuple[int, float, float]]:
    """Return step, rate and expected rate wherever they differ by more than the tolerance."""
    pairs = ((step, rate, schedule.rate(step + shift)) for step, rate in points)
    most = TOLERANCE * schedule.peak
    return [(step, rate, wanted) for step, rate, wanted in pairs if abs(rate - wanted) > most]


def fewest_misses(schedule: Schedule, points: Sequence[Point]) -> list[tuple[int, float, float]]:
    """Return the misses of the shift that fits best."""
    return min((misses(schedule, points, shift) for shift in SHIFTS), key=len)


def what_fits(schedule: Schedule, points: Sequence[Point]) -> str:
    """Return what the rates would fit: another factor, kind or warm-up; empty if none of these."""
    for shift in SHIFTS:
        pairs = [(rate, schedule.rate(step + shift)) for step, rate in points]
        ratios = sorted(r / wanted for r, wanted in pairs if wanted > TOLERANCE * schedule.peak)
        factor = ratios[len(ratios) // 2] if ratios else 0.0
        if factor > 0 and not misses(
            replace(schedule, peak=schedule.peak * factor, floor=schedule.floor * factor),
            points,
            shift,
        ):
            return f"they are {factor:.4g} times the configured ones"
    for kind in ("constant", "linear", "cosine"):
        for warmup in dict.fromkeys((schedule.warmup, 0)):
            other = replace(schedule, kind=kind, warmup=warmup)
            if (kind == "constant" or schedule.steps) and not fewest_misses(other, points):
                return f"they fit this schedule: {other}"
    return ""


def follows_schedule(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that the learning rate of every step is that of the configuration."""
    config = limits.config if limits.config is not None else log.config
    if config is None:
        raise NotJudged("no configuration was given (--config)")
    points = log.finite.get("lr", ())
    if not points or not log.numbered:
        raise NotJudged("the log has no learning rate" if not points else "entries have no step")
    schedule = schedule_in(config, log.max_steps)
    wrong = fewest_misses(schedule, points)
    if wrong:
        step, rate, wanted = wrong[0]
        fits = what_fits(schedule, points)
        yield LogFinding(
            "schedule",
            "error",
            step,
            f"the learning rate is {rate:.4g} and the configuration ({schedule}, peak {schedule.peak:g}) has "
            f"{wanted:.4g}; {len(wrong)} of {len(points)} entries differ by more than {TOLERANCE:.0%} of the peak"
            + (f"; {fits}" if fits else ""),
            claim="rates-follow-the-configuration",
        )
