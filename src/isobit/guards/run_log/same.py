"""Compare the recorded curves of two runs: the first step at which they differ, with both values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    ours, theirs = ({step for step, _ in log.curves["loss"]} for log in (a, b))
    if not ours & theirs:
        raise ArgumentError(
            expected="two logs with steps in common",
            received=f"losses of steps {min(ours)}–{max(ours)} and {min(theirs)}–{max(theirs)}",
            remedy="compare logs of the same steps",
        )
    low, high = max(min(ours), min(theirs)), min(max(ours), max(theirs))
    alone = sorted(step for step in ours ^ theirs if low <= step <= high)
    if alone:
        count = sum(step in ours for step in alone)
        findings.append(
            LogFinding(
                "steps-differ",
                "error",
                alone[0],
                f"{len(alone):,} steps between {low} and {high} are in one log only: {count:,} in the first, "
                f"{len(alone) - count:,} in the second; the first is {alone[0]}",
                "logs of other intervals; a run that was resumed; entries that were lost",
            )
        )
    for name in both:
        pairs = list(pairs_of(a.curves[name], b.curves[name]))
        compared[name] = len(pairs)
        nonfinite += sum(not math.isfinite(x) and is_near(x, y, 0.0) for _, x, y in pairs)
        wrong = [(step, x, y) for step, x, y in pairs if not is_near(x, y, tolerance)]
        if wrong:
            step, x, y = wrong[0]
            worst = max(wrong, key=lambda each: distance(each[1], each[2]))
            findings.append(
                LogFinding(
                    f"differs-{name}",
                    "error",
                    step,
                    f"{name} is {x!r} in the first and {y!r} in the second; {len(wrong):,} of {len(pairs):,} values "
                    f"differ by more than {tolerance:g} of the larger, at most by {distance(*worst[1:]):.3g} at "
                    f"step {worst[0]}",
                    "other data or another order of it; another seed; other weights at the start; an order of sums "
                    "that depends on the number of ranks or micro-batches; a resume without the optimizer's state",
                )
            )
    findings.sort(key=lambda finding: (finding.step, finding.rule))
    beyond = [sum(not low <= step <= high for step in steps) for steps in (ours, theirs)]
    return Sameness(
        tuple(findings),
        compared,
        tuple(name for name in {**a.curves, **b.curves} if name not in both),
        (beyond[0], beyond[1]),
        nonfinite,
    )


def pairs_of(a: Sequence[Point], b: Sequence[Point]) -> Iterator[tuple[int, float, float]]:
    """Yield step and both values of the steps that both curves have; micro-batches of a step in their order."""
    held = defaultdict[int, list[float]](list)
    for step, value in b:
        held[step].append(value)
    taken = defaultdict[int, int](int)
    for step, value in a:
        at = taken[step]
        taken[step] += 1
        if step in held:
            yield step, value, held[step][at] if at < len(held[step]) else other_than(value)
    for step, values in held.items():
        for value in values[taken[step] :] if taken[step] else ():
            yield step, other_than(value), value


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
