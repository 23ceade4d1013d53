"""Find the alarms of a long curve: those of `Drift`, value by value, in a fraction of its time.

[Note: where no alarm can be]
`Drift` compares each value with the 128 before it. The windows of 8 consecutive values share 121 values. Their order
statistics bound the median and the deviation of all 8 windows, and so each score from above. A sum of bounds is never
below the sum of scores. Where it is empty, the sum of scores is empty too, and `Drift` would have no memory but its
window and its means. From such a place on, `Drift` itself runs wherever the bounds allow an alarm. What it finds is
what it would have found on the whole curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from isobit.guards.live.drift import CUT, LIMIT, SLACK, SPIKE, WINDOW, Drift, Reading

TOGETHER = 8  # values whose windows are bounded together
SHARED = WINDOW - TOGETHER + 1  # values that all of their windows have
ROWS = 8192  # windows that are sorted at a time
MARGIN = 1e-6  # more than the rounding errors of a bound and of its sum
Floats = npt.NDArray[np.float64]


def alarms_of(values: Sequence[float], *, log: bool = False) -> Iterator[tuple[int, Reading]]:
    """Yield place and reading of every alarm, as `Drift` gives them.

    Args:
        values: Finite numbers.
        log: As of `Drift`.
    """
    at, detector = 0, Drift(log=log)
    for start, end in suspects(np.array(values, dtype=np.float64), log):
        if start > at:
            at, detector = start, primed(values, at, start, detector)
        while at < len(values) and (at < end or is_busy(detector)):
            reading = detector.add(values[at])
            if reading.is_alarm:
                yield at, reading
            at += 1


def primed(values: Sequence[float], at: int, start: int, before: Drift) -> Drift:
    """Return a detector that remembers the window before `start`, the means of the curve, and nothing else.

    Args:
        values: The curve.
        at: How many of its values `before` has taken.
        start: The next value to judge.
        before: The detector so far.
    """
    for value in values[at:start]:
        before.average(value)
    detector = Drift(log=before.log)
    for value in values[start - WINDOW : start]:
        detector.learn(math.log(max(value, 1e-300)) if before.log else value)
    detector.mean, detector.lowest, detector.start = before.mean, before.lowest, before.start
    detector.count = before.count
    return detector


def is_busy(detector: Drift) -> bool:
    """Return whether a detector remembers more than its window."""
    return detector.sum > 0 or detector.quiet > 0 or detector.above  # and so after a shift


def suspects(values: Floats, log: bool) -> Iterator[tuple[int, int]]:
    """Yield the parts of a curve that may have an alarm; each begins where no sum is kept. See the note above."""
    first = min(2 * WINDOW, len(values))
    yield 0, first
    if len(values) <= first:
        return
    seen = np.log(np.maximum(values, 1e-300)) if log else values
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is a suspect
        bounds = upper_scores(seen, first, log)
    sums = np.cumsum(np.minimum(bounds, CUT) - SLACK + MARGIN)
    lowest = np.minimum(np.minimum.accumulate(sums), 0.0)
    is_danger = (sums - lowest > LIMIT - MARGIN) | (bounds > SPIKE - MARGIN)
    dangers, empty = np.flatnonzero(is_danger), np.flatnonzero(sums <= lowest)
    before = np.searchsorted(empty, dangers)  # 0: the sum has not been empty yet
    starts = np.concatenate([[-1 - first], empty])[before] + 1 + first
    for start, danger in zip(starts.tolist(), dangers.tolist(), strict=True):
        yield start, first + danger + 1


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
