"""Kinds of vectors for replays: together they meet what a sum can do to its terms, over the dtype's whole range.

One kind is not enough. With exponents from -6 to 10 a compensated sum is exact, so it agrees with an exact addition of
all terms; with terms that cancel at every scale it does not. [Note: kinds] Each kind aims at something that probing
does not see: a second accumulator, a fixed-point window, a rounding made twice, an order that follows the sign, the
size or the equality of terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from isobit.order.target import Scale

Pairs = list[tuple[int, int]]
ROOM = 4  # exponents that a narrow draw spans on either side


@dataclass(frozen=True)
class Space:
    """What one draw may use: `n` terms of a scale, which of them are to cancel, how wide their exponents may be."""

    random: Random
    n: int
    scale: Scale
    pairs: Pairs  # terms that have equal factors, so that they can cancel
    groups: Sequence[Sequence[int]]  # one term of each operand of each fused addition
    spread: int  # exponents over which the accumulator still rounds
    widths: tuple[int, ...]  # significand bits of the additions
    turn: int  # the how manieth vector of its kind

    @property
    def normal(self) -> int:
        """The exponent of the smallest normal number."""
        return self.scale.smallest + self.scale.bits - 1

    @property
    def safe(self) -> int:
        """The largest exponent at which n terms cannot overflow."""
        return self.scale.largest - self.n.bit_length() - 1

    def number(self, exponent: int, sign: int = 0) -> float:
        """A full random mantissa at this exponent; a random sign unless one is given."""
        exponent = min(max(exponent, self.scale.smallest), self.scale.largest)
        last = max(exponent - self.scale.bits + 1, self.scale.smallest)
        mantissa = self.random.getrandbits(exponent - last + 1) | (1 << (exponent - last))
        return math.ldexp(mantissa * (sign or self.random.choice((1, -1))), last)

    def fit(self, value: float) -> float:
        """The nearest number of the dtype."""
        _, exponent = math.frexp(value)
        last = max(exponent - self.scale.bits, self.scale.smallest)
        return math.ldexp(round(math.ldexp(value, -last)), last)

    def between(self, low: int, high: int, sign: int = 0) -> list[float]:
        """n numbers with exponents from low to high."""
        low, high = max(low, self.scale.smallest), min(high, self.scale.largest)
        room, bits = max(high - low, 0) + 1, self.scale.bits
        if low - bits + 1 < self.scale.smallest:
            return [self.number(low + self.random.randrange(room), sign) for _ in range(self.n)]
        top, draw = 1 << (bits - 1), self.random.getrandbits  # the same for normal numbers, much faster
        return [
            math.ldexp(((r & (top - 1)) | top) * (sign or (r >> 24 & 2) - 1), low + (r >> 32) % room - bits + 1)
            for r in (draw(60) for _ in range(self.n))
        ]

    def cancel(self, values: list[float]) -> list[float]:
        """Of each pair the second is the first, negated; one that is left over is as small as the smallest."""
        for i, j in self.pairs:
            values[j] = -values[i]
        paired = {term for pair in self.pairs for term in pair}
        for left in set(range(self.n)) - paired:
            values[left] = min(values, key=abs)
        return values

    def zeros(self) -> list[float]:
        """n zeros."""
        return [0.0] * self.n


def _narrow(space: Space) -> list[float]:
    return space.between(-4, 3)


def _narrow_cancelling(space: Space) -> list[float]:
    return space.cancel(space.between(-4, 3))


def _wide(space: Space) -> list[float]:
    return space.between(-space.spread, 3)


def _wide_cancelling(space: Space) -> list[float]:
    return space.cancel(space.between(-space.spread, 3))


def _wider_cancelling(space: Space) -> list[float]:
    return space.cancel(space.between(-space.spread, 9))


def _whole_range(space: Space) -> list[float]:
    return space.between(space.scale.smallest, space.safe)


def _whole_range_cancelling(space: Space) -> list[float]:
    return space.cancel(space.between(space.scale.smallest, space.safe))


def _positive(space: Space) -> list[float]:
    return space.between(-4 if space.turn % 2 else -space.spread, 3, 1)


def _negative(space: Space) -> list[float]:
    return space.between(-space.spread if space.turn % 2 else -4, 3, -1)


def _equal(space: Space) -> list[float]:
    return [space.number(0, 1 - 2 * (space.turn % 2))] * space.n


def _equal_sizes(space: Space) -> list[float]:
    one = space.number(0, 1)
    return [one * space.random.choice((1, -1)) for _ in range(space.n)]


def _subnormal(space: Space) -> list[float]:
    return space.between(space.scale.smallest, space.normal - 1)


def _around_normal(space: Space) -> list[float]:
    return space.between(space.normal - ROOM, space.normal + ROOM)


def _overflowing(space: Space) -> list[float]:
    return space.between(space.scale.largest - 2, space.scale.largest)


def _below_overflow(space: Space) -> list[float]:
    return space.between(space.safe - ROOM, space.safe)


def _ladder(space: Space) -> list[float]:
    """Pairs that cancel at scales from the largest to the smallest, all at once, and a rest that must be left."""
    low, high = space.scale.smallest, space.safe
    order = list(space.pairs)
    space.random.shuffle(order)
    values, steps = space.zeros(), max(len(order) - 1, 1)
    for at, (i, j) in enumerate(order):
        values[i] = space.number(high - (high - low) * at // steps)
        values[j] = -values[i]
    _leave(space, values, order)
    return values


def _few_steps(space: Space) -> list[float]:
    """Two to six such pairs, far apart, among zeros."""
    order = list(space.pairs)
    space.random.shuffle(order)
    order = order[: 2 + space.turn % 5]
    values, exponent = space.zeros(), space.safe
    for i, j in order:
        values[i] = space.number(exponent)
        values[j] = -values[i]
        exponent -= space.random.randint(*((8, 60) if space.scale.largest > 20 else (3, 12)))
    _leave(space, values, order)
    return values


def _leave(space: Space, values: list[float], order: Pairs) -> None:
    """A small number where nothing stands yet, or instead of a pair, so that the sum is not zero."""
    free = [i for i, value in enumerate(values) if not value]
    if free:
        values[space.random.choice(free)] = space.number(space.random.randint(space.scale.smallest, 0))
    elif order:
        i, j = order[-1]
        values[i], values[j] = space.number(-ROOM), 0.0


def _sparse(space: Space) -> list[float]:
    values = space.zeros()
    for at in space.random.sample(range(space.n), min(space.n, 3 + space.turn % 4)):
        values[at] = space.number(space.random.randint(space.scale.smallest, space.safe))
    return values


def _half_zeros(space: Space) -> list[float]:
    return [v if space.random.random() < 0.5 else math.copysign(0.0, v) for v in space.between(-space.spread, 3)]


def _rising(space: Space) -> list[float]:
    return sorted(space.between(-space.spread, 3), key=abs)


def _falling(space: Space) -> list[float]:
    return sorted(space.between(-space.spread, 3), key=abs, reverse=True)


def _sorted(space: Space) -> list[float]:
    return sorted(space.between(-4, 3), reverse=bool(space.turn % 2))


def _powers(space: Space) -> list[float]:
    """Powers of two and the numbers beside them."""
    near = 2.0 ** (1 - space.scale.bits)
    low = -min(space.spread, space.scale.lowest)
    return [
        space.fit(math.ldexp(space.random.choice((1, 1 + near, 1 - near / 2, -1, -1 - near)), e))
        for e in (space.random.randint(low, 4) for _ in range(space.n))
    ]


def _ties(space: Space) -> list[float]:
    """Ones, halves of their last place in some width, and what decides the tie."""
    width = space.widths[space.turn % len(space.widths)]
    near = 2.0 ** (1 - space.scale.bits)
    low = max(-2 * width, -space.scale.lowest)
    small = [2.0**-width, 2.0**-width * (1 + near), 2.0 ** -(width + 1), 2.0**low]
    chosen = [1.0, 1.0 + near, *small]
    return [space.fit(space.random.choice(chosen)) * space.random.choice((1, -1)) for _ in range(space.n)]


def _lone_tie(space: Space) -> list[float]:
    """One number, half of its last place, and something far smaller that decides; zeros elsewhere.

    In a fused addition the three stand under three of its operands.
    """
    values, width = space.zeros(), space.widths[space.turn % len(space.widths)]
    terms = space.random.choice(space.groups) if space.groups else range(space.n)
    at = space.random.sample(list(terms), min(len(terms), 3))
    exponent = space.random.randint(-3, 4)
    far = space.random.choice((2 * width + 2, 54, 60, 100))
    mantissa = space.number(exponent, 1)
    for i, value in zip(at, (mantissa, 2.0 ** (exponent - width), 2.0 ** (exponent - far)), strict=False):
        values[i] = space.fit(value) * space.random.choice((1, -1))
    return values


def _one_large(space: Space) -> list[float]:
    values = space.between(-4, 3)
    values[(0, space.n - 1, space.random.randrange(space.n))[space.turn % 3]] = space.number(min(20, space.safe))
    return values


def _whole_numbers(space: Space) -> list[float]:
    most = 500 if space.turn % 2 else 1 << min(20, max(space.safe, 4))
    return [space.fit(float(space.random.randint(-most, most))) for _ in range(space.n)]


def _gaussian(space: Space) -> list[float]:
    return [space.fit(space.random.gauss(0, 1)) for _ in range(space.n)]


def _scaled(space: Space) -> list[float]:
    """Exponents of one narrow run, which moves through the range that models use, then through all of it."""
    middle = (-12, 12, -6, 6, -9, 9, -20, 18, -30, 40, -60, 80, -90, 100)[space.turn % 14]
    middle = max(min(middle, space.safe), space.scale.smallest + ROOM)
    return space.between(middle - 2, middle)


def _steps_in_groups(space: Space) -> list[float]:
    """In every fused addition a ladder of its own: what it does not add exactly is wrong there."""
    values = space.zeros()
    for group in space.groups:
        terms = list(group)
        space.random.shuffle(terms)
        count = space.random.randint(1, max((len(terms) - 1) // 2, 1))
        top, room = space.safe, space.safe - space.scale.smallest
        for at in range(count):
            if 2 * at + 1 < len(terms):
                values[terms[2 * at]] = space.number(top - room * at // count)
                values[terms[2 * at + 1]] = -values[terms[2 * at]]
        if 2 * count < len(terms):
            values[terms[2 * count]] = space.number(space.random.randint(-ROOM, 0))
    return values


Kind = Callable[[Space], list[float]]
KINDS: dict[str, Kind] = {
    "narrow": _narrow,
    "narrow, cancelling": _narrow_cancelling,
    "wide": _wide,
    "wide, cancelling": _wide_cancelling,
    "wider, cancelling": _wider_cancelling,
    "whole range": _whole_range,
    "whole range, cancelling": _whole_range_cancelling,
    "cancelling at every scale": _ladder,
    "cancelling at a few scales": _few_steps,
    "positive": _positive,
    "negative": _negative,
    "equal": _equal,
    "equal but for signs": _equal_sizes,
    "sparse": _sparse,
    "half zeros": _half_zeros,
    "rising": _rising,
    "falling": _falling,
    "sorted": _sorted,
    "powers of two and neighbours": _powers,
    "ties": _ties,
    "a tie alone": _lone_tie,
    "one large": _one_large,
    "whole numbers": _whole_numbers,
    "gaussian": _gaussian,
    "one scale": _scaled,
    "below overflow": _below_overflow,
}
EXTREME: dict[str, Kind] = {
    "subnormal": _subnormal,
    "around the smallest normal": _around_normal,
    "overflowing": _overflowing,
}
IN_GROUPS: dict[str, Kind] = {"cancelling inside fused additions": _steps_in_groups}


def kinds_of(scale: Scale, fused: bool) -> dict[str, Kind]:
    """The kinds that a target of this scale can be given."""
    return KINDS | (EXTREME if scale.subnormal else {}) | (IN_GROUPS if fused else {})


def draw_pairs(random: Random, n: int, groups: Sequence[Sequence[int]]) -> Pairs:
    """Every term but an odd one with another; inside the fused additions, half of the time."""
    runs: Iterator[list[int]] = iter([list(range(n))])
    if groups and random.random() < 0.5:
        runs = (list(group) for group in groups)
    pairs: Pairs = []
    for run in runs:
        random.shuffle(run)
        pairs += zip(run[0::2], run[1::2], strict=False)
    return pairs
