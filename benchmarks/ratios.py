"""How a ratio of two times is told: the median of interleaved rounds, and the quartiles beside it."""

import math
import statistics
from dataclasses import dataclass

ROUNDS = 7  # of a ratio that is shown, at least


def geomean(values):
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


@dataclass(frozen=True)
class Ratio:
    """Stock's time / ours: above 1 ours is faster. One ratio per round, in which both took turns."""

    rounds: tuple[float, ...]

    @classmethod
    def of(cls, stock, ours):
        """Compare the times of two contenders, round by round."""
        return cls(tuple(s / o for s, o in zip(stock, ours, strict=True)))

    @classmethod
    def mean(cls, ratios):
        """Return the geometric mean of several ratios, round by round."""
        return cls(tuple(geomean(each) for each in zip(*(r.rounds for r in ratios), strict=False)))

    @property
    def median(self):
        return statistics.median(self.rounds)

    @property
    def quartiles(self):
        """Return the first and the third quartile; fewer than seven rounds have none."""
        if len(self.rounds) < ROUNDS:
            raise ValueError(f"expected {ROUNDS} rounds at least, received {len(self.rounds)}")
        first, _, last = statistics.quantiles(self.rounds, n=4)
        return first, last

    def cells(self):
        """Return the median, or `about 1` where the quartiles have 1 between them, and the quartiles."""
        first, last = self.quartiles
        shown = "about 1" if first <= 1 <= last else f"{self.median:.2f}"
        return shown, f"{first:.2f} to {last:.2f}"
