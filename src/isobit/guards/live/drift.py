"""Detect, online, when a curve of a training run leaves its course: spikes, sustained shifts and divergence.

[Note: two detectors over one window]
Each value is compared with the last 128 ones by a robust z-score: its distance from their median, in units of their
median absolute deviation. One value far above is a spike. A CUSUM adds the excess of the scores (cut at 4, so that one
spike is not enough) over a slack of 1; when the sum passes 30 the curve has shifted. A falling curve lies below the
median of its past, so that a healthy run keeps the sum at zero. The median takes over a new level after half a window,
so that one shift is reported once. A rise slower than that is for `isobit runlog`, which compares with 500 steps ago.

[Note: when a shift is a divergence]
A shift is a warning: data and batch sizes change, and rewards move. It is a divergence, an error that may stop a run,
if in the 128 values after it the median of the last 64 lies above a limit that is set when the shift is found. That
median ignores a spike of up to 31 values from which the run recovers. The limit of a loss is the lowest exponential
mean plus the largest of: half of it; a tenth of what the run has gained since its first 64 values, so that a loss of
almost zero may move by many times itself; and 6 robust standard deviations, so that a loss around zero is judged by its
noise. The limit of a logarithm, as of a gradient norm, is ten times the median before the shift, and at least the level
of the first 64 values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from itertools import islice

from isobit.errors import ArgumentError

WINDOW, SPIKE, SLACK, LIMIT, CUT = 128, 12.0, 1.0, 30.0, 4.0
LEARNING = 64  # values before the first verdict
MEAN_WINDOW = 100
RECENT = 64  # values whose median is the level after a shift
RISE, LOST, NOISE, FACTOR = 0.5, 0.1, 6.0, 10.0  # see [Note: when a shift is a divergence]


@dataclass(frozen=True)
class Reading:
    """What a detector says of one value.

    Attributes:
        status: "learning", "steady", "spike", "shift", "divergence" or "nonfinite".
        severity: "info", "warning" for a spike or a shift, "error" for a divergence or a number that is not finite.
        score: The robust z-score of a spike, the sum of a shift, the level of a divergence; 0 while learning.
        mean: The exponential mean of the values so far.

    Example:
        >>> from isobit.guards import Drift
        >>> Drift().add(float("nan")).status
        'nonfinite'
    """

    status: str
    severity: str
    score: float
    mean: float

    @property
    def is_alarm(self) -> bool:
        """Whether this is a spike, a shift, a divergence or a number that is not finite."""
        return self.severity != "info"


class Drift:
    """A detector over one curve, such as the loss or the gradient norm. See [Note: two detectors over one window].

    Args:
        log: Judge the logarithm, for positive quantities of a wide range such as norms and ratios.
        spike: The robust z-score from which a single value is a spike.
        limit: The sum of excess scores from which the curve has shifted.

    Raises:
        ArgumentError: If a limit is not positive.

    Example:
        >>> from isobit.guards import Drift
        >>> detector = Drift()
        >>> for step in range(200):
        ...     reading = detector.add(2.0 + 0.01 * (step % 7) + (step >= 150))
        ...     if reading.is_alarm:
        ...         print(step, reading.status)
        150 spike
        160 shift
    """

    def __init__(self, *, log: bool = False, spike: float = SPIKE, limit: float = LIMIT) -> None:
        if not (spike > 0 and limit > 0):
            raise ArgumentError(
                expected="positive limits",
                received=f"spike={spike}, limit={limit}",
                remedy="leave them out for the defaults",
            )
        self.log, self.spike, self.limit = log, spike, limit
        self.values: deque[float] = deque()
        self.sorted: list[float] = []
        self.sum = self.mean = 0.0
        self.lowest = math.inf
        self.start = 0.0  # the exponential mean of the first values
        self.count = self.quiet = 0
        self.above = False
        self.ceiling: float | None = None  # after a shift, the level from which it is a divergence

    def add(self, value: float) -> Reading:
        """Take the next value of the curve.

        Args:
            value: The value; one that is not finite is reported and not learnt from.

        Returns:
            The reading of this value.
        """
        if not math.isfinite(value):
            return Reading("nonfinite", "error", 0.0, self.mean)
        self.average(value)
        seen = math.log(max(value, 1e-300)) if self.log else value
        score = self.score(seen)
        self.learn(seen)
        if self.count <= LEARNING:
            return Reading("learning", "info", 0.0, self.mean)
        self.quiet = max(self.quiet - 1, 0)
        self.sum = 0.0 if self.quiet else max(0.0, self.sum + min(score, CUT) - SLACK)
        if self.sum > self.limit:
            total, self.sum, self.quiet = self.sum, 0.0, WINDOW
            self.ceiling = self.divergence_limit()
            return Reading("shift", "warning", total, self.mean)
        if self.ceiling is not None:
            level = sorted(islice(reversed(self.values), RECENT))[RECENT // 2]
            is_over = level > self.ceiling
            self.ceiling = None if is_over or not self.quiet else self.ceiling
            if is_over:
                shown = math.exp(min(level, 700.0)) if self.log else level
                return Reading("divergence", "error", shown, self.mean)
        first, self.above = not self.above, score > self.spike
        if self.above and first and not self.quiet:  # the first of consecutive ones
            return Reading("spike", "warning", score, self.mean)
        return Reading("steady", "info", score, self.mean)

    def average(self, value: float) -> None:
        """Put a value into the exponential mean, and note the first mean and the lowest."""
        self.mean += (value - self.mean) / min(self.count + 1, MEAN_WINDOW)
        self.count += 1
        if self.count == LEARNING:
            self.start = self.mean
        if self.count >= LEARNING:
            self.lowest = min(self.lowest, self.mean)

    def divergence_limit(self) -> float:
        """Return the level from which a shift that was just found is a divergence; see the note above."""
        middle, spread = median_and_deviation(self.sorted)
        noise = NOISE * 1.4826 * spread
        if self.log:
            return max(middle + max(math.log(FACTOR), noise), math.log(max(self.start, 1e-300)))
        gained = self.start - self.lowest
        return self.lowest + max(RISE * abs(self.lowest), LOST * gained, noise)

    def score(self, seen: float) -> float:
        """Return the robust z-score of a value against the window."""
        if len(self.sorted) < 2:
            return 0.0
        middle, spread = median_and_deviation(self.sorted)
        # A curve that hardly moves must not make noise in its last digits an alarm.
        least = 1e-3 if self.log else 1e-3 * abs(middle) + 1e-12
        return (seen - middle) / max(1.4826 * spread, least)

    def learn(self, seen: float) -> None:
        """Put a value into the window, and take the oldest out."""
        if len(self.values) == WINDOW:
            del self.sorted[bisect_left(self.sorted, self.values.popleft())]
        self.values.append(seen)
        insort(self.sorted, seen)


def median_and_deviation(values: list[float]) -> tuple[float, float]:
    """Return the median of sorted values, and the median of their distances from it.

    The distances to the left of the median and to the right of it are two sorted lists. The value wanted is in the
    place `half` of both together; a binary search finds how many of those before it are on the right.

    Args:
        values: Sorted, at least one.
    """
    half = len(values) // 2
    middle = values[half]
    low, high = 1, len(values) - half  # the median itself is on the right
    while low < high:
        right = (low + high) // 2  # and half + 1 - right on the left
        if values[half + right] - middle < middle - values[right - 1]:
            low = right + 1
        else:
            high = right
    spread = values[half + low - 1] - middle
    if low <= half:
        spread = max(spread, middle - values[low - 1])
    return middle, spread
