"""The rules of a run's log: what is not finite, rises, spikes, exceeds its limit, stands still or is missing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import chain, islice, pairwise, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.guards.live.drift import (
    CUT,
    LEARNING,
    LIMIT,
    RECENT,
    SLACK,
    SPIKE,
    WINDOW,
    Drift,
    Reading,
    median_and_deviation,
)
from isobit.guards.run_log.curves import (
    STEPS_KEPT,
    Curve,
    Point,
    RunLog,
    last_of_steps,
    number_of,
    rates_of,
)

# What judging a log returns: limits, findings, the verdict; and what the rules share.

SHOWN = 5  # steps of a finding that are written out


@dataclass(frozen=True)
class Limits:
    """What a log is judged by.

    Attributes:
        warmup: Steps that are not judged for a rising loss.
        max_norm: The limit of the gradient norm after clipping.
        norms: "clipped", "unclipped", or "auto": unclipped in a trainer_state.json or printed text, as transformers
            logs them.
        config: The configuration, for the schedule of the learning rate; None is what the log itself has.
    """

    warmup: int = 100
    max_norm: float = 10.0
    norms: str = "auto"
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LogFinding:
    """A rule that a log breaks.

    Attributes:
        rule: The rule.
        severity: "info", "warning" or "error"; info does not count against the run.
        step: The first step concerned.
        message: What was found.
        causes: What usually causes it, the most frequent first; empty if a contract says it.
        claim: The claim of training-stability-v1 whose `if_fails` has the causes.
        steps: The steps concerned, where the finding counts several; of more than 10,000, the first.
    """

    rule: str
    severity: str
    step: int
    message: str
    causes: str = ""
    claim: str = ""
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What was found in a log, which rules were judged, and why others were not."""

    findings: tuple[LogFinding, ...]
    judged: tuple[str, ...]
    not_judged: dict[str, str]

    @property
    def is_kept(self) -> bool:
        """Whether nothing was found that counts."""
        return all(finding.severity == "info" for finding in self.findings)


def name_steps(steps: Sequence[int], count: int) -> str:
    """Return how often something was found and at which steps, the first of them; nothing if it was found once."""
    if count < 2:
        return ""
    more = ", …" if count > SHOWN else ""
    return f"; {count:,} in all, at steps {', '.join(map(str, steps[:SHOWN]))}{more}"


@dataclass
class Seen:
    """At how many places something was found, and the step of the first."""

    count: int = 0
    step: int = 0

    def add(self, step: int) -> None:
        """Count one more."""
        self.step = self.step if self.count else step
        self.count += 1


class NotJudged(Exception):
    """A log that a rule cannot judge, with the reason."""


# Compare the learning rates of a log with the schedule that the configuration describes.

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
    schedule: Schedule, points: Iterable[Point], shift: int
) -> Iterator[tuple[int, float, float]]:
    """Yield step, rate and expected rate wherever they differ by more than the tolerance."""
    pairs = ((step, rate, schedule.rate(step + shift)) for step, rate in points)
    most = TOLERANCE * schedule.peak
    return ((step, rate, wanted) for step, rate, wanted in pairs if abs(rate - wanted) > most)


def fits(schedule: Schedule, points: Iterable[Point], shift: int) -> bool:
    """Return whether no rate differs by more than the tolerance."""
    return next(misses(schedule, points, shift), None) is None


def fewest_misses(
    schedule: Schedule, points: Iterable[Point]
) -> tuple[int, tuple[int, float, float]]:
    """Return how many rates differ, and the first of them, of the shift that fits best."""
    found = []
    for shift in SHIFTS:
        first, count = (0, 0.0, 0.0), 0
        for count, miss in enumerate(misses(schedule, points, shift), 1):
            first = miss if count == 1 else first
        found.append((count, first))
    return min(found, key=lambda each: each[0])


def what_fits(schedule: Schedule, points: Curve) -> str:
    """Return what the rates would fit: another factor, kind or warm-up; empty if none of these."""
    for shift in SHIFTS:
        factor = middle_of(partial(ratios, schedule, points, shift))
        other = replace(schedule, peak=schedule.peak * factor, floor=schedule.floor * factor)
        if factor > 0 and fits(other, points, shift):
            return f"they are {factor:.4g} times the configured ones"
    for kind in ("constant", "linear", "cosine"):
        for warmup in dict.fromkeys((schedule.warmup, 0)):
            other = replace(schedule, kind=kind, warmup=warmup)
            usable = kind == "constant" or schedule.steps
            if usable and any(fits(other, points, shift) for shift in SHIFTS):
                return f"they fit this schedule: {other}"
    return ""


def ratios(schedule: Schedule, points: Iterable[Point], shift: int) -> Iterator[float]:
    """Yield the rates as multiples of the expected ones, where these are not almost zero."""
    for step, rate in points:
        wanted = schedule.rate(step + shift)
        if wanted > TOLERANCE * schedule.peak:
            yield rate / wanted


def middle_of(values: Callable[[], Iterable[float]]) -> float:
    """Return the median of numbers that can be read again; 0 if there are none.

    A float's 64 bits, made to rise with its value, are found 16 at a time: each pass counts the values that begin with
    those that are known, by their next 16.
    """
    known, place = 0, -1
    for shift in (48, 32, 16, 0):
        counts = np.zeros(1 << 16, dtype=np.int64)
        reading = iter(values())
        while some := list(islice(reading, ROWS)):
            bits = np.array(some).view(np.uint64)
            bits ^= np.where(bits >> 63, np.uint64(2**64 - 1), np.uint64(2**63))
            same = bits if shift == 48 else bits[bits >> np.uint64(shift + 16) == known]
            digits = (same >> np.uint64(shift)) & np.uint64(0xFFFF)
            counts += np.bincount(digits.astype(np.int64), minlength=1 << 16)
        if place < 0:
            place = int(counts.sum()) // 2
            if not counts.any():
                return 0.0
        below = np.cumsum(counts)
        digit = int(np.searchsorted(below, place, side="right"))
        place -= int(below[digit - 1]) if digit else 0
        known = known << 16 | digit
    value = known ^ (2**63 if known >> 63 else 2**64 - 1)
    return float(np.uint64(value).view(np.float64))


def follows_schedule(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that the learning rate of every step is that of the configuration."""
    config = limits.config if limits.config is not None else log.config
    if config is None:
        raise NotJudged("no configuration was given (--config)")
    points = log.finite.get("lr")
    if not points or not log.numbered:
        raise NotJudged("the log has no learning rate" if not points else "entries have no step")
    schedule = schedule_in(config, log.max_steps)
    wrong, (step, rate, wanted) = fewest_misses(schedule, points)
    if wrong:
        other = what_fits(schedule, points)
        yield LogFinding(
            "schedule",
            "error",
            step,
            f"the learning rate is {rate:.4g} and the configuration ({schedule}, peak {schedule.peak:g}) has "
            f"{wanted:.4g}; {wrong} of {len(points)} entries differ by more than {TOLERANCE:.0%} of the peak"
            + (f"; {other}" if other else ""),
            claim="rates-follow-the-configuration",
        )


# Find the alarms of a long curve, a block at a time: those of `Drift`, in a fraction of its time.
#
# [Note: where no alarm can be]
# `Drift` compares each value with the 128 before it. The windows of 8 consecutive values share 121
# values. Their order statistics bound the median and the deviation of all 8 windows, and so each
# score from above. A sum of bounds is never below the sum of scores. Where it is empty, the sum of
# scores is empty too, and `Drift` would have no memory but its window and its means. From such a
# place on, `Drift` itself runs wherever the bounds allow an alarm. What it finds is what it would
# have found on the whole curve.

TOGETHER = 8  # values whose windows are bounded together
SHARED = WINDOW - TOGETHER + 1  # values that all of their windows have
ROWS = 8192  # windows that are sorted at a time
MARGIN = 1e-6  # more than the rounding errors of a bound and of its sum
Floats = npt.NDArray[np.float64]


def alarms_of(values: Iterable[float], *, log: bool = False) -> Iterator[tuple[int, Reading]]:
    """Yield place and reading of every alarm, as `Drift` gives them; one block of the values is kept.

    Args:
        values: Finite numbers.
        log: As of `Drift`.
    """
    reading = iter(values)
    block, before, start = list(islice(reading, 2 * WINDOW)), list[float](), 0
    parts, excess = [(0, len(block))], 0.0  # nothing bounds the scores of the first values
    detector, is_current = Drift(log=log), True  # whether it has seen the last values
    while block:
        at = 0  # values of the block that the detector has taken
        for begin, end in parts:
            if begin > at or not is_current:
                for value in block[at:begin]:
                    detector.average(value)
                at, is_current = begin, True
                detector = primed((before + block[max(at - WINDOW, 0) : at])[-WINDOW:], detector)
            while at < len(block) and (at < end or is_busy(detector)):
                found = detector.add(block[at])
                if found.is_alarm:
                    yield start + at, found
                at += 1
        is_current = at == len(block)
        for value in block[at:]:
            detector.average(value)
        start, before = start + len(block), (before + block)[-WINDOW:]
        block = list(islice(reading, ROWS * TOGETHER))
        if block:
            parts, excess = suspects(np.array(before + block), log, excess)
            parts = [(0, 0), *parts] if is_current else parts  # it may be busy


def primed(window: Sequence[float], before: Drift) -> Drift:
    """Return a detector that remembers a window, the means of the curve so far, and nothing else."""
    detector = Drift(log=before.log)
    for value in window:
        detector.learn(math.log(max(value, 1e-300)) if before.log else value)
    detector.mean, detector.lowest, detector.start = before.mean, before.lowest, before.start
    detector.count = before.count
    return detector


def is_busy(detector: Drift) -> bool:
    """Return whether a detector remembers more than its window."""
    return detector.sum > 0 or detector.quiet > 0 or detector.above  # and so after a shift


def suspects(values: Floats, log: bool, excess: float) -> tuple[list[tuple[int, int]], float]:
    """Return the parts of a block that may have an alarm, and the sum of bounds at its end; see the note above.

    Each part begins where no sum is kept, or where the block begins. The last one ends with the block if a sum is kept
    there, so that the next block need not look back.

    Args:
        values: The block, after the WINDOW values before it.
        log: As of `Drift`.
        excess: The sum of bounds before the block.
    """
    seen = np.log(np.maximum(values, 1e-300)) if log else values
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is a suspect
        bounds = upper_scores(seen, WINDOW, log)
    sums = excess + np.cumsum(np.minimum(bounds, CUT) - SLACK + MARGIN)
    lowest = np.minimum(np.minimum.accumulate(sums), 0.0)
    is_danger = (sums - lowest > LIMIT - MARGIN) | (bounds > SPIKE - MARGIN)
    dangers, empty = np.flatnonzero(is_danger), np.flatnonzero(sums <= lowest)
    starts = np.concatenate([[-1], empty]) + 1
    begins = starts[np.searchsorted(empty, dangers)]
    parts = list(zip(begins.tolist(), (dangers + 1).tolist(), strict=True))
    left = float(sums[-1] - lowest[-1])
    if left > 0:
        parts.append((int(starts[-1]), len(sums)))
    return parts, left


def upper_scores(seen: Floats, first: int, log: bool) -> Floats:
    """Return a number that the score of each value from `first` on does not exceed.

    Of the 121 shared values in their order, the median of a window is at least the 58th and at most the 65th, because
    the window has 7 others. At most 64 of its 128 values are nearer to the median than both the 90th is to the 65th
    and the 32nd to the 58th, so that the deviation is not smaller.
    """
    count = len(seen) - first
    windows = np.lib.stride_tricks.sliding_window_view(seen, SHARED)[first - SHARED :: TOGETHER]
    half = WINDOW // 2
    low, high = half - (TOGETHER - 1), half
    spare = half - 2 * (TOGETHER - 1) + 1  # of values that may be nearer
    right, left = high + spare // 2, low - (spare - spare // 2)
    out = np.empty(len(windows) * TOGETHER)
    for at in range(0, len(windows), ROWS):
        rows = np.sort(windows[at : at + ROWS], axis=1)
        nearest = np.minimum(rows[:, right] - rows[:, high], rows[:, low] - rows[:, left])
        size = np.maximum(np.maximum(rows[:, low], -rows[:, high]), 0.0)
        least = np.maximum(1.4826 * nearest, 1e-3 if log else 1e-3 * size + 1e-12)
        start = first + at * TOGETHER
        some = np.zeros(len(rows) * TOGETHER)
        given = seen[start : start + len(some)]
        some[: len(given)] = given
        above = np.maximum(some.reshape(-1, TOGETHER) - rows[:, [low]], 0.0) / least[:, None]
        out[at * TOGETHER : at * TOGETHER + len(some)] = above.ravel()
    return np.nan_to_num(out[:count], nan=np.inf, posinf=np.inf)


# Compare each value of a curve with its neighbours: spikes that a descent hides, and the noise of a loss.
#
# [Note: spikes during a descent]
# `Drift` compares a value with the 128 before it. In the first entries after a descent these have the
# descent itself, and a spike is lost in its range. Where this is so, a value is compared with its
# neighbours instead: with the median of the 16 before it and that of the 16 after it, whichever is
# larger, so that neither a fall nor a change of level is a spike. The noise is measured by the 65 values
# around it, each by its distance from the middle of its own two medians: a trend cancels there. A spike
# is 8 robust standard deviations above, and also 6 times as far as the fourth of these distances, counted
# from the largest, without those of the nearest 8 on either side, which may belong to the spike. The
# latter is what keeps heavy tails silent. Curves of a steady level are left to `Drift`: a value is judged
# only where `Drift` would need one that is half as high again.

AROUND = 16  # values on either side
SPREAD = 65  # values whose distances are the noise
NEAR = 8.0  # robust standard deviations of a spike
TAIL, RANK, OWN = 6.0, 4, 8  # times the fourth largest distance, without the nearest values
HIDDEN = 1.5  # how much more than usual `Drift` needs


@dataclass(frozen=True)
class Surroundings:
    """Some values of a curve, and those around each of them.

    Attributes:
        start: The place of the first value in the curve.
        judged: Places in `values` that have all of their neighbours, or the end of the curve.
        values: The values.
        before: The median of the values before each.
        after: The median of the values after each.
        noise: The robust standard deviation around each.
    """

    start: int
    judged: range
    values: Floats
    before: Floats
    after: Floats
    noise: Floats

    @property
    def middle(self) -> Floats:
        """What each value is expected to be."""
        return self.before / 2 + self.after / 2


def surroundings_of(values: Iterable[float], count: int, width: int) -> Iterator[Surroundings]:
    """Yield the values of a curve with their surroundings; one block of them is kept.

    Args:
        values: Finite numbers.
        count: How many there are, more than twice the width.
        width: Values on either side of which the median is taken.
    """
    reading = iter(values)
    margin = WINDOW + AROUND  # at least WINDOW, and SPREAD // 2 + width
    kept, start, begin = np.zeros(0), 0, 0
    is_last = False
    while not is_last:
        some = list(islice(reading, ROWS * TOGETHER))
        is_last = start + len(kept) + len(some) >= count
        kept = np.concatenate([kept, np.array(some, dtype=np.float64)])
        stop = len(kept) if is_last else len(kept) - margin
        if stop <= begin:
            continue
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is no finite noise
            before, after = neighbours_of(kept, width)
            noise = noise_of(np.abs(kept - before / 2 - after / 2))
        yield Surroundings(start, range(begin, stop), kept, before, after, noise)
        cut = max(stop - margin, 0)
        kept, start, begin = kept[cut:], start + cut, stop - cut


def neighbours_of(values: Floats, width: int) -> tuple[Floats, Floats]:
    """Return the median of the `width` values before each and of those after it; at an end both are the same."""
    count = len(values)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    middles = np.empty(len(windows))
    for at in range(0, len(windows), ROWS):
        rows = np.sort(windows[at : at + ROWS], axis=1)
        middles[at : at + ROWS] = rows[:, (width - 1) // 2] / 2 + rows[:, width // 2] / 2
    places = np.arange(count)
    before = middles[np.clip(places - width, 0, count - width)]
    after = middles[np.clip(places + 1, 0, count - width)]
    return (
        np.where(places < width, after, before),
        np.where(places > count - 1 - width, before, after),
    )


def noise_of(distances: Floats) -> Floats:
    """Return the robust standard deviation around each value, from the distances of the values around it."""
    count = len(distances)
    span = min(SPREAD, count)
    windows = np.lib.stride_tricks.sliding_window_view(distances, span)
    spreads = np.empty(len(windows))
    for at in range(0, len(windows), ROWS):
        spreads[at : at + ROWS] = np.partition(windows[at : at + ROWS], span // 2)[:, span // 2]
    places = np.clip(np.arange(count) - span // 2, 0, count - span)
    return 1.4826 * spreads[places]


def hidden_spikes(values: Iterable[float], count: int) -> Iterator[tuple[int, Reading]]:
    """Yield place and reading of every spike that a descent hides from `Drift`; see the note above.

    Args:
        values: Finite numbers.
        count: How many there are.
    """
    if count <= SPREAD:
        return
    quiet = 0  # the place before which a value belongs to the last spike
    for some in surroundings_of(values, count, AROUND):
        with np.errstate(over="ignore", invalid="ignore"):
            noise = np.maximum(some.noise, 1e-3 * np.abs(some.middle) + 1e-12)
            base = np.maximum(some.before, some.after)
            above = some.values - base
            places = np.flatnonzero(above > NEAR * noise).tolist()
        for at in places:
            place = some.start + at
            if at not in some.judged or place < max(LEARNING, quiet):
                continue
            limit = drift_limit(some.values[max(at - WINDOW, 0) : at].tolist())
            height, noise_there = float(above[at]), float(noise[at])
            is_hidden = some.values[at] <= limit
            is_hidden = is_hidden and limit - base[at] > HIDDEN * SPIKE * noise_there
            if is_hidden and height > TAIL * large_distance(some, at):
                quiet = place + AROUND
                yield place, Reading("spike", "warning", height / noise_there, math.nan)


def drift_limit(window: list[float]) -> float:
    """Return the value from which `Drift` calls the next one a spike."""
    middle, spread = median_and_deviation(sorted(window))
    return middle + SPIKE * max(1.4826 * spread, 1e-3 * abs(middle) + 1e-12)


def large_distance(some: Surroundings, at: int) -> float:
    """Return the fourth largest distance of the values around one, without the nearest."""
    first = min(max(at - SPREAD // 2, 0), len(some.values) - SPREAD)
    others = [*range(first, max(at - OWN, first)), *range(at + OWN + 1, first + SPREAD)]
    middles = some.before[others] / 2 + some.after[others] / 2
    return float(np.sort(np.abs(some.values[others] - middles))[-RANK])


RISE, SPAN = 0.05, 500  # the most that it may rise, over so many steps
ERRORS = 5.0  # standard errors of a rise, below which it may be noise; see `rising_loss`
CLIPPED, CLOSE = (
    3.0,
    4,
)  # robust standard deviations to which a value counts, and neighbours on either side
RISE_WINDOWS = (100, 500)  # steps of the mean; the latter tells a lasting rise from more noise
FLAT, FLAT_SPAN = 0.001, 2000  # a mean that falls by less than this share over so many steps

GAPS_KEPT = 10_000  # intervals between steps that are counted

Rule = Callable[[RunLog, Limits], Iterator[LogFinding]]


def judge_log(log: RunLog, limits: Limits | None = None) -> Verdict:
    """Judge a log by every rule.

    Args:
        log: The log.
        limits: What it is judged by; None for the defaults.

    Returns:
        Findings in the order of their steps.
    """
    found: list[LogFinding] = []
    judged, skipped = [], {}
    for name, rule in RULES.items():
        try:
            found += rule(log, limits or Limits())
            judged.append(name)
        except NotJudged as reason:
            skipped[name] = str(reason)
    found.sort(key=lambda finding: (finding.step, finding.rule))
    return Verdict(tuple(found), tuple(judged), skipped)


def nonfinite(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that every logged number is finite."""
    for name, points in log.curves.items():
        wrong = Seen()
        for step, value in points:
            if not math.isfinite(value):
                wrong.add(step)
        if wrong.count:
            yield LogFinding(
                "nonfinite",
                "error",
                wrong.step,
                f"{name} is not finite in {wrong.count} of {len(points)} entries, first at step {wrong.step}",
                claim="stays-finite",
            )


def hidden_nonfinite(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Find losses that stand in for one that was not finite: beside a norm that is not, or exactly 0."""
    beside, zeros, losses, norms = Seen(), Seen(), 0, 0
    end = math.inf, math.nan
    others = last_of_steps(log.curves["loss"])
    at, loss = next(others, end)
    for step, norm in last_of_steps(log.curves.get("grad_norm", ())):
        norms += 1
        while at < step:
            at, loss = next(others, end)
        if at == step and math.isfinite(loss) and not math.isfinite(norm):
            beside.add(step)
    for step, loss in last_of_steps(log.curves["loss"]):
        losses += 1
        if loss == 0.0:
            zeros.add(step)
    cause = (
        "transformers' logging_nan_inf_filter replaces a loss that is not finite; set it to False"
    )
    if beside.count:
        yield LogFinding(
            "hidden-nonfinite",
            "error",
            beside.step,
            f"the loss is finite and the gradient norm is not, in {beside.count} of {norms} entries",
            f"{cause}; or an overflow in the backward",
        )
    if 0 < zeros.count < losses / 2:
        yield LogFinding(
            "hidden-nonfinite",
            "warning",
            zeros.step,
            f"the loss is exactly 0 in {zeros.count} of {losses} entries",
            f"{cause}; or batches without a label",
        )


def rising_loss(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check FALSIFY-ALBOR-001: after warm-up the exponential mean of the loss rises by at most 5 % over 500 steps.

    The mean of a log of every tenth step has about 10 entries, and one of the many means that are compared is far off
    by chance. A rise counts if it is also more than 5 standard errors of the two means: noise that is independent from
    entry to entry passes that in fewer than one of a million comparisons. A value that is far from its neighbours is a
    spike; it counts up to 3 standard deviations. A rise that lasts, but is lost in the noise of 100 steps, may be found
    in the mean over 500.
    """
    means = log.mean_loss
    if not means or means[-1][0] - means[0][0] < limits.warmup + SPAN:
        span = means[-1][0] - means[0][0] if means else 0
        raise NotJudged(f"the log spans {span} steps, of {limits.warmup} + {SPAN} that are needed")
    if not math.isfinite(means[-1][1]):
        raise NotJudged("the mean of the losses overflows")
    if len(means) <= 2 * CLOSE:
        raise NotJudged(
            f"{len(means)} losses, of more than {2 * CLOSE} that tell a rise from noise"
        )
    start = means[0][0] + limits.warmup
    if not any(rise_of(mean, old) > RISE for (_, mean), (_, old) in earlier(means, means, start)):
        return
    for window in RISE_WINDOWS:
        first, worst, margin = significant_rise(log.shown_loss, window, start)
        if first is not None:
            noise = f", {margin:.1f} standard errors" if margin < math.inf else ""
            yield LogFinding(
                "rising-loss",
                "error",
                first,
                f"the exponential mean of the loss over {window} steps is more than {RISE:.0%} above that of {SPAN} "
                f"steps before, by up to {worst:.1%}{noise} (FALSIFY-ALBOR-001)",
                claim="loss-falls",
            )
            return


def significant_rise(points: Curve, window: int, start: int) -> tuple[int | None, float, float]:
    """Return the first step at which a mean has risen too much, the largest such rise, and its standard errors."""
    first, worst, margin = None, 0.0, 0.0
    means, variances = means_with_errors(points, window)
    pairs = zip(earlier(means, means, start), earlier(variances, variances, start), strict=True)
    for ((step, mean), (_, old)), ((_, now), (_, then)) in pairs:
        rise, error = rise_of(mean, old), math.sqrt(now + then)
        if rise > RISE and mean - old > ERRORS * error:
            first = step if first is None else first
            if rise > worst:
                worst, margin = rise, (mean - old) / error if error else math.inf
    return first, worst, margin


def rise_of(mean: float, before: float) -> float:
    """Return the rise of a mean as a share of the one before; 0 if that is 0."""
    return (mean - before) / abs(before) if before else 0.0


def earlier(
    points: Iterable[Point], again: Iterable[Point], start: int
) -> Iterator[tuple[Point, Point]]:
    """Yield each point with the last one of at least SPAN steps before, from `start` on.

    Args:
        points: Points whose steps rise.
        again: The same points.
        start: The first step that another is compared with.
    """
    behind = pairwise(chain(again, [(math.inf, 0.0)]))
    before, (following, _) = next(behind)
    for point in points:
        if point[0] - SPAN < start:
            continue
        while following <= point[0] - SPAN:
            before, (following, _) = next(behind)
        yield point, (int(before[0]), before[1])


def means_with_errors(points: Curve, window: int) -> tuple[Curve, Curve]:
    """Return the exponential mean of values that are clipped at the noise around them, and the mean's variance."""
    means, variances = Curve(), Curve()
    mean = variance = 0.0
    steps = zip(points, rates_of(points, window), strict=True)
    for some in surroundings_of((value for _, value in points), len(points), CLOSE):
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = (some.middle + sign * CLIPPED * some.noise for sign in (-1, 1))
            judged = slice(some.judged.start, some.judged.stop)
            calm = np.clip(some.values, low, high)[judged].tolist()
        for value, noise in zip(calm, some.noise[judged].tolist(), strict=True):
            (step, _), rate = next(steps)
            mean += rate * (value - mean)
            variance = (1 - rate) * (1 - rate) * variance + rate * noise * rate * noise
            means.append(step, mean)
            variances.append(step, variance)
    return means, variances


def norm_limit(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check FALSIFY-ALBOR-002: the gradient norm after clipping stays below the limit."""
    norms = log.finite.get("grad_norm")
    if not norms and log.norm_like:
        raise NotJudged(
            f"the log has no gradient norm under a known name; if {log.norm_like[0]} is one, pass --columns "
            f"grad_norm={log.norm_like[0]}, and if none is, --columns grad_norm="
        )
    if not norms:
        raise NotJudged("the log has no gradient norm")
    is_unknown = limits.norms == "auto" and log.form in ("trainer_state", "text")
    if limits.norms == "unclipped" or is_unknown:
        raise NotJudged("the norms were logged before clipping (--norms clipped if they were not)")
    above, largest = Seen(), 0.0
    for step, norm in norms:
        if norm >= limits.max_norm:
            above.add(step)
            largest = max(largest, norm)
    if above.count:
        yield LogFinding(
            "norm-limit",
            "error",
            above.step,
            f"the gradient norm is at least {limits.max_norm:g} in {above.count} of {len(norms)} entries, at most "
            f"{largest:.4g} (FALSIFY-ALBOR-002)",
            claim="norms-are-bounded",
        )


@dataclass
class Alarms:
    """Alarms of one kind: the first, how many there are, and their steps."""

    step: int
    value: float
    reading: Reading
    count: int = 0
    steps: list[int] = field(default_factory=list)


def spikes(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Find where the loss, or the logarithm of the norm, leaves its course; see isobit.guards.live.drift."""
    for name in ("loss", "grad_norm"):
        points = log.finite.get(name, Curve())
        if name == "loss" and len(points) <= 64:
            raise NotJudged(f"{len(points)} losses, of more than 64 that are needed")
        found: dict[str, Alarms] = {}
        seen = alarms_of((value for _, value in points), log=name == "grad_norm")
        # Norms have spikes of their own while they fall, and falling by a half is little in a logarithm.
        hidden = hidden_spikes((value for _, value in points), len(points) * (name == "loss"))
        for at, reading in merge(seen, hidden, key=itemgetter(0)):
            step, value = points[at]
            alarms = found.setdefault(reading.status, Alarms(step, value, reading))
            alarms.count += 1
            if len(alarms.steps) < STEPS_KEPT:
                alarms.steps.append(step)
        for status, alarms in found.items():
            if is_reported(log, f"{status}-{name}", alarms):
                continue  # by the run's own watch, which may name the module
            reading = alarms.reading
            against = (
                f"the median of the last {RECENT} entries is {reading.score:.6g}"
                if status == "divergence"
                else f"score {reading.score:.1f} against the last 128 entries"
                if not math.isnan(reading.mean)
                else f"score {reading.score:.1f} against {AROUND} entries on either side; the last 128 have a descent"
            )
            yield LogFinding(
                f"{status}-{name}",
                reading.severity,
                alarms.step,
                f"{name} is {alarms.value:.6g}, {against}{name_steps(alarms.steps, alarms.count)}",
                "a bad batch or a change of data; a learning rate that is too high; for Adam, a beta2 that is too "
                "large for gradients that change",
                steps=tuple(alarms.steps),
            )


def is_reported(log: RunLog, rule: str, alarms: Alarms) -> bool:
    """Return whether the run's own watch reported these alarms of a curve; not if some steps are not remembered."""
    reported = log.reported.get(rule.replace("grad_norm", "grad.norm"))
    return (
        reported is not None
        and alarms.count == len(alarms.steps)
        and reported.steps.keys() >= set(alarms.steps)
    )


def plateau(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that the loss still falls at the end of the log."""
    means = log.mean_loss
    last = means[-1][0] if means else 0
    if means and not math.isfinite(means[-1][1]):
        raise NotJudged("the mean of the losses overflows")
    start, before = -1, 0.0
    for step, mean in takewhile(lambda point: point[0] <= last - FLAT_SPAN, means):
        start, before = step, mean
    if start < max(limits.warmup, 0):
        raise NotJudged(f"the log has no {FLAT_SPAN} steps after warm-up")
    if before - means[-1][1] < FLAT * abs(before):
        yield LogFinding(
            "plateau",
            "info",
            last - FLAT_SPAN,
            f"the exponential mean of the loss fell by less than {FLAT:.1%} in the last {FLAT_SPAN} steps",
            "the run has converged; a learning rate of almost zero; parameters that are not in the optimizer",
        )


def missing_steps(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that steps rise by one interval: none is missing."""
    if not log.numbered:
        raise NotJudged("entries have no step")
    losses = log.curves["loss"]
    gaps: Counter[int] = Counter()
    for (a, _), (b, _) in pairwise(losses):
        if b > a:
            gaps[b - a] += 1
            if len(gaps) > GAPS_KEPT:
                raise NotJudged(f"steps rise by more than {GAPS_KEPT:,} different intervals")
    if not gaps:
        raise NotJudged("the log has one entry")
    usual = gaps.most_common(1)[0][0]
    first, lost, holes = (0, 0), 0, 0
    for (a, _), (b, _) in pairwise(losses):
        # The first and the last entry of many loggers are off the interval.
        if b - a > usual and a != losses[0][0] and b != losses[-1][0]:
            first = first if holes else (a, b)
            holes, lost = holes + 1, lost + ((b - a) // usual - 1 or 1)
    if holes:
        yield LogFinding(
            "missing-steps",
            "warning",
            first[0],
            f"no entry between steps {first[0]} and {first[1]}, where every {usual} is usual; entries that are "
            f"missing: {lost:,}; places: {holes:,}",
            "a crash between log and checkpoint; a filter of the logger; a file of several runs",
        )


def repeated_steps(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that no step is logged twice."""
    if not log.numbered:
        raise NotJudged("entries have no step")
    backs = log.resumed
    places = "1 place" if log.resumes == 1 else f"{log.resumes:,} places"
    if backs:
        yield LogFinding(
            "repeated-steps",
            "warning",
            backs[0][1],
            f"step {backs[0][1]} follows step {backs[0][0]}; steps go back in {places}. Of entries "
            f"that were logged again the later ones are judged, and {log.replaced:,} earlier ones are not",
            "the run was resumed from an earlier checkpoint; several runs or ranks write one file",
        )


def readable(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Check that every entry can be read. The last of a run that was killed, or still writes, may be cut."""
    if log.unreadable:
        yield LogFinding(
            "unreadable",
            "warning",
            log.unread_after,
            f"{log.unreadable:,} of {log.rows:,} entries cannot be read, the first after step {log.unread_after}; "
            "what they have is not judged",
            "several processes write one file; a disk that was full; text of another program in the log",
        )
    if log.cut:
        where = "" if log.cut == 1 else f" of {log.cut} files"
        yield LogFinding(
            "cut-off",
            "info",
            log.curves["loss"][-1][0],
            f"the last entry{where} is not whole, and is not judged",
            "the run was killed, or still writes",
        )


def reported(log: RunLog, limits: Limits) -> Iterator[LogFinding]:
    """Pass on what the run's own watch reported."""
    if log.form != "events" and not log.reported:
        raise NotJudged("the log is not one of isobit.guards.watch")
    for rule, one in log.reported.items():
        steps = tuple(one.steps)
        yield LogFinding(
            f"watch: {rule}",
            one.severity,
            one.step,
            f"{one.message}{name_steps(steps, one.count)}",
            "see docs/how-to/watch-a-run.md",
            steps=steps,
        )


RULES: dict[str, Rule] = {
    "nonfinite": nonfinite,
    "hidden-nonfinite": hidden_nonfinite,
    "rising-loss": rising_loss,
    "norm-limit": norm_limit,
    "spikes": spikes,
    "plateau": plateau,
    "missing-steps": missing_steps,
    "repeated-steps": repeated_steps,
    "readable": readable,
    "schedule": follows_schedule,
    "reported": reported,
}
