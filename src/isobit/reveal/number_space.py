"""What the vectors of replays are drawn from: the numbers of a dtype, and the terms that cancel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from isobit.reveal.target import Scale

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Space:
    """What one draw may use: `n` terms of a scale, the pairs that cancel, the range of exponents."""

    random: Random
    n: int
    scale: Scale
    pairs: Pairs  # terms that have equal factors, so that they can cancel
    groups: Sequence[Sequence[int]]  # one term of each operand of each fused addition
    spread: int  # exponents over which the accumulator still rounds
    widths: tuple[int, ...]  # significand bits of the additions
    turn: int  # the index of the vector among those of its kind

    @property
    def normal(self) -> int:
        """The exponent of the smallest normal number."""
        return self.scale.smallest + self.scale.bits - 1

    @property
    def safe(self) -> int:
        """The largest exponent at which n terms cannot overflow."""
        return self.scale.largest - self.n.bit_length() - 1

    def number(self, exponent: int, sign: int = 0) -> float:
        """Return a random mantissa at this exponent, with a random sign unless one is given."""
        exponent = min(max(exponent, self.scale.smallest), self.scale.largest)
        last = max(exponent - self.scale.bits + 1, self.scale.smallest)
        mantissa = self.random.getrandbits(exponent - last + 1) | (1 << (exponent - last))
        return math.ldexp(mantissa * (sign or self.random.choice((1, -1))), last)

    def fit(self, value: float) -> float:
        """Return the nearest number of the dtype."""
        _, exponent = math.frexp(value)
        last = max(exponent - self.scale.bits, self.scale.smallest)
        return math.ldexp(round(math.ldexp(value, -last)), last)

    def between(self, low: int, high: int, sign: int = 0) -> list[float]:
        """Return n numbers with exponents from low to high."""
        low, high = max(low, self.scale.smallest), min(high, self.scale.largest)
        room, bits = max(high - low, 0) + 1, self.scale.bits
        if low - bits + 1 < self.scale.smallest:
            return [self.number(low + self.random.randrange(room), sign) for _ in range(self.n)]
        # The same for normal numbers, much faster.
        top, draw = 1 << (bits - 1), self.random.getrandbits
        return [
            math.ldexp(
                ((r & (top - 1)) | top) * (sign or (r >> 24 & 2) - 1),
                low + (r >> 32) % room - bits + 1,
            )
            for r in (draw(60) for _ in range(self.n))
        ]

    def cancel(self, values: list[float]) -> list[float]:
        """Negate the first of each pair into the second; an unpaired term gets the smallest value."""
        for i, j in self.pairs:
            values[j] = -values[i]
        paired = {term for pair in self.pairs for term in pair}
        for left in set(range(self.n)) - paired:
            values[left] = min(values, key=abs)
        return values

    def zeros(self) -> list[float]:
        """Return n zeros."""
        return [0.0] * self.n


def draw_pairs(random: Random, n: int, groups: Sequence[Sequence[int]]) -> Pairs:
    """Pair the terms at random; half of the time only inside fused additions."""
    runs: Iterator[list[int]] = iter([list(range(n))])
    if groups and random.random() < 0.5:
        runs = (list(group) for group in groups)
    pairs: Pairs = []
    for run in runs:
        random.shuffle(run)
        pairs += zip(run[0::2], run[1::2], strict=False)
    return pairs
