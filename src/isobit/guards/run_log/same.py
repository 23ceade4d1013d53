"""Compare the recorded curves of two runs: the first step at which they differ, with both values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from operator import itemgetter

from isobit.errors import ArgumentError
from isobit.guards.run_log.curves import Point, RunLog
from isobit.guards.run_log.rules import Limits, LogFinding, readable


@dataclass(frozen=True)
class Sameness:
    """What a comparison of two logs found.

    Attributes:
        findings: Curves that differ, steps of their common range that only one log has, and entries that cannot be
            read.
        compared: Values of both logs that were compared, by curve.
        one_sided: Curves that only one of the two logs has.
        beyond: Steps before or after the range that both have, by log; they are not compared.
        nonfinite: Pairs that are equal and not finite.
    """

    findings: tuple[LogFinding, ...]
    compared: dict[str, int]
    one_sided: tuple[str, ...]
    beyond: tuple[int, int]
    nonfinite: int

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.findings


def compare_logs(a: RunLog, b: RunLog, tolerance: float = 0.0) -> Sameness:
    """Compare two logs step by step (DIST-002 on recorded curves).

    Args:
        a: The first log.
        b: The second log.
        tolerance: The largest difference, as a share of the larger value; 0 allows none. Two values that are not
            finite are equal if both are NaN, or the same infinity.

    Returns:
        What differs.

    Raises:
        ArgumentError: If entries have no step, or the losses have no step in common.
    """
    for log in (a, b):
        if not log.numbered:
            raise ArgumentError(
                expected="logs whose entries have a step",
                received=f"{log.path}: entries without one",
                remedy="name its column: --columns step=NAME",
            )
    findings = [
        replace(finding, message=f"{log.path}: {finding.message}")
        for log in (a, b)
        for finding in readable(log, Limits())
        if finding.severity != "info"
    ]
    compared: dict[str, int] = {}
    nonfinite = 0
    both = [name for name in a.curves if name in b.curves]
    ends = [(log.curves["loss"][0][0], log.curves["loss"][-1][0]) for log in (a, b)]
    low, high = max(first for first, _ in ends), min(last for _, last in ends)
    steps = count_steps(a.curves["loss"], b.curves["loss"], low, high)
    if not steps.both:
        raise ArgumentError(
            expected="two logs with steps in common",
            received="losses of steps " + " and ".join(f"{first}–{last}" for first, last in ends),
            remedy="compare logs of the same steps",
        )
    alone = sum(steps.alone)
    if alone:
        findings.append(
            LogFinding(
                "steps-differ",
                "error",
                steps.first,
                f"{alone:,} steps between {low} and {high} are in one log only: {steps.alone[0]:,} in the first, "
                f"{steps.alone[1]:,} in the second; the first is {steps.first}",
                "logs of other intervals; a run that was resumed; entries that were lost",
            )
        )
    for name in both:
        compared[name], wrong, largest = 0, 0, -1.0
        first, worst = (0, 0.0, 0.0), 0
        for step, x, y in pairs_of(a.curves[name], b.curves[name]):
            compared[name] += 1
            nonfinite += not math.isfinite(x) and is_near(x, y, 0.0)
            if is_near(x, y, tolerance):
                continue
            first = first if wrong else (step, x, y)
            wrong += 1
            if distance(x, y) > largest:
                largest, worst = distance(x, y), step
        if wrong:
            step, x, y = first
            findings.append(
                LogFinding(
                    f"differs-{name}",
                    "error",
                    step,
                    f"{name} is {x!r} in the first and {y!r} in the second; {wrong:,} of {compared[name]:,} values "
                    f"differ by more than {tolerance:g} of the larger, at most by {largest:.3g} at step {worst}",
                    "other data or another order of it; another seed; other weights at the start; an order of sums "
                    "that depends on the number of ranks or micro-batches; a resume without the optimizer's state",
                )
            )
    findings.sort(key=lambda finding: (finding.step, finding.rule))
    return Sameness(
        tuple(findings),
        compared,
        tuple(name for name in {**a.curves, **b.curves} if name not in both),
        steps.beyond,
        nonfinite,
    )


@dataclass(frozen=True)
class Steps:
    """Steps of two logs: how many both have, how many one has, in their common range and beyond it."""

    both: int
    alone: tuple[int, int]
    first: int  # of those that are alone
    beyond: tuple[int, int]


def count_steps(a: Iterable[Point], b: Iterable[Point], low: int, high: int) -> Steps:
    """Count the steps of two curves, whose common range is from `low` to `high`."""
    both, first, alone, beyond = 0, 0, [0, 0], [0, 0]
    for step, x, y in steps_of(a, b):
        if not low <= step <= high:
            beyond[0] += x is not None
            beyond[1] += y is not None
        elif x is None or y is None:
            first = first if any(alone) else step
            alone[x is None] += 1
        else:
            both += 1
    return Steps(both, (alone[0], alone[1]), first, (beyond[0], beyond[1]))


def steps_of(
    a: Iterable[Point], b: Iterable[Point]
) -> Iterator[tuple[int, Iterator[Point] | None, Iterator[Point] | None]]:
    """Yield each step of two curves, whose steps rise, with its points in either; None if it has none."""
    groups = [groupby(points, itemgetter(0)) for points in (a, b)]
    ours, theirs = (next(each, None) for each in groups)
    while ours is not None or theirs is not None:
        if theirs is None or (ours is not None and ours[0] < theirs[0]):
            assert ours is not None
            yield ours[0], ours[1], None
            ours = next(groups[0], None)
        elif ours is None or theirs[0] < ours[0]:
            yield theirs[0], None, theirs[1]
            theirs = next(groups[1], None)
        else:
            yield ours[0], ours[1], theirs[1]
            ours, theirs = next(groups[0], None), next(groups[1], None)


def pairs_of(a: Iterable[Point], b: Iterable[Point]) -> Iterator[tuple[int, float, float]]:
    """Yield step and both values of the steps that both curves have; micro-batches of a step in their order."""
    for step, ours, theirs in steps_of(a, b):
        if ours is None or theirs is None:
            continue
        for x, y in zip_longest(ours, theirs):
            if x is None or y is None:
                value = (x or y)[1]
                yield (
                    (step, value, other_than(value))
                    if y is None
                    else (step, other_than(value), value)
                )
            else:
                yield step, x[1], y[1]


def other_than(value: float) -> float:
    """Return what stands for a micro-batch that one log does not have, and differs from the other's value."""
    return 0.0 if math.isnan(value) else math.nan


def is_near(a: float, b: float, tolerance: float) -> bool:
    """Return whether two values are equal up to a share of the larger."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or (tolerance > 0 and distance(a, b) <= tolerance)


def distance(a: float, b: float) -> float:
    """Return the difference of two values as a share of the larger; infinite if one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    size = max(abs(a), abs(b))
    return abs(a / size - b / size) if size else 0.0
