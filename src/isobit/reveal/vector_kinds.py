"""Kinds of vectors for replays, over the dtype's whole range.

[Note: kinds]
One kind is not enough. With exponents from -6 to 10 a compensated sum is exact, so it agrees with an exact addition of
all terms; with terms that cancel at every scale it does not. Each kind tests something that probing does not show: a
second accumulator, a fixed-point window, a double rounding, an order that depends on the sign, the size or the equality
of terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from isobit.reveal.target import Scale

# What the vectors of replays are drawn from: the numbers of a dtype, and the terms that cancel.

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


ROOM = 4  # exponents that a narrow draw spans on either side
# Places below a number that fp32, fp64, x87, double-double and fp128 accumulators do not hold; 0: the smallest number.
DUST = (55, 26, 66, 108, 115, 0)


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
    """Return pairs that cancel at scales from the largest to the smallest, and a rest that must be left."""
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
    """Return two to six such pairs, far apart, among zeros."""
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
    """Put a small number at a zero, or in place of a pair, so that the sum is not zero."""
    free = [i for i, value in enumerate(values) if not value]
    if free:
        values[space.random.choice(free)] = space.number(
            space.random.randint(space.scale.smallest, 0)
        )
    elif order:
        i, j = order[-1]
        values[i], values[j] = space.number(-ROOM), 0.0


def _sparse(space: Space) -> list[float]:
    values = space.zeros()
    for at in space.random.sample(range(space.n), min(space.n, 3 + space.turn % 4)):
        values[at] = space.number(space.random.randint(space.scale.smallest, space.safe))
    return values


def _half_zeros(space: Space) -> list[float]:
    return [
        v if space.random.random() < 0.5 else math.copysign(0.0, v)
        for v in space.between(-space.spread, 3)
    ]


def _rising(space: Space) -> list[float]:
    return sorted(space.between(-space.spread, 3), key=abs)


def _falling(space: Space) -> list[float]:
    return sorted(space.between(-space.spread, 3), key=abs, reverse=True)


def _sorted(space: Space) -> list[float]:
    return sorted(space.between(-4, 3), reverse=bool(space.turn % 2))


def _powers(space: Space) -> list[float]:
    """Return powers of two and their neighbours."""
    near = 2.0 ** (1 - space.scale.bits)
    low = -min(space.spread, space.scale.lowest)
    return [
        space.fit(math.ldexp(space.random.choice((1, 1 + near, 1 - near / 2, -1, -1 - near)), e))
        for e in (space.random.randint(low, 4) for _ in range(space.n))
    ]


def _ties(space: Space) -> list[float]:
    """Return ones, halves of their last place in some width, and numbers that decide the tie."""
    width = space.widths[space.turn % len(space.widths)]
    near = 2.0 ** (1 - space.scale.bits)
    low = max(-2 * width, -space.scale.lowest)
    small = [2.0**-width, 2.0**-width * (1 + near), 2.0 ** -(width + 1), 2.0**low]
    chosen = [1.0, 1.0 + near, *small]
    return [
        space.fit(space.random.choice(chosen)) * space.random.choice((1, -1))
        for _ in range(space.n)
    ]


def _lone_tie(space: Space) -> list[float]:
    """Return one number, half of its last place, and a far smaller one that decides; zeros elsewhere.

    In a fused addition the three are under three of its operands.
    """
    width, at = space.widths[space.turn % len(space.widths)], _operands(space)
    exponent = space.random.randint(*((-3, 4) if space.turn % 2 else (0, space.safe)))
    far = space.random.randint(width + 1, max(exponent - space.scale.smallest, width + 1))
    values = space.zeros()
    first = space.number(exponent, 1) if space.turn % 3 == 2 else _even(space, exponent, width)
    chosen = (first, 2.0 ** (exponent - width), 2.0 ** (exponent - far))
    for i, value in zip(at, chosen, strict=False):
        values[i] = space.fit(value) * space.random.choice((1, -1))
    return values


def _tie_and_dust(space: Space) -> list[float]:
    """Return a tie that is decided by many tiny terms of one sign, each below some accumulator's last place."""
    width, at = space.widths[space.turn % len(space.widths)], _operands(space)
    turn, which = divmod(space.turn // len(space.widths), len(DUST))
    exponent = space.random.randint(-3, max(min(space.safe, 4), -3)) if DUST[which] else space.safe
    dust = space.fit(2.0 ** (exponent - DUST[which])) if DUST[which] else 2.0**space.scale.smallest
    values, sign = space.zeros(), space.random.choice((1, -1))
    for i in at:
        values[i] = dust * sign
    ties = (width, 53) if turn % 2 else (width,)  # a tie of fp64 that decides the tie
    for i, value in zip(
        at, (_even(space, exponent, width), *(2.0 ** (exponent - w) for w in ties)), strict=False
    ):
        values[i] = space.fit(value) * sign
    return values


def _even(space: Space, exponent: int, width: int) -> float:
    """Return a number whose last place in this width is even, so that a tie above it is rounded down."""
    kept = min(space.scale.bits, width) - 2
    return math.ldexp(space.random.getrandbits(kept) | (1 << kept), exponent - kept)


def _operands(space: Space) -> list[int]:
    """Return a term under each operand of one fused addition, or all terms, shuffled."""
    terms = list(space.random.choice(space.groups)) if space.groups else list(range(space.n))
    space.random.shuffle(terms)
    return terms


def _one_large(space: Space) -> list[float]:
    values = space.between(-4, 3)
    values[(0, space.n - 1, space.random.randrange(space.n))[space.turn % 3]] = space.number(
        min(20, space.safe)
    )
    return values


def _whole_numbers(space: Space) -> list[float]:
    most = 500 if space.turn % 2 else 1 << min(20, max(space.safe, 4))
    return [space.fit(float(space.random.randint(-most, most))) for _ in range(space.n)]


def _gaussian(space: Space) -> list[float]:
    return [space.fit(space.random.gauss(0, 1)) for _ in range(space.n)]


def _scaled(space: Space) -> list[float]:
    """Return exponents of one narrow run, which moves through the range that models use, then all of it."""
    middle = (-12, 12, -6, 6, -9, 9, -20, 18, -30, 40, -60, 80, -90, 100)[space.turn % 14]
    middle = max(min(middle, space.safe), space.scale.smallest + ROOM)
    return space.between(middle - 2, middle)


def _steps_in_groups(space: Space) -> list[float]:
    """Return a ladder of its own for every fused addition: an inexact one is wrong there."""
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
    "a tie and dust": _tie_and_dust,
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
    """Return the kinds that apply to a target of this scale."""
    return KINDS | (EXTREME if scale.subnormal else {}) | (IN_GROUPS if fused else {})
