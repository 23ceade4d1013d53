"""What can be probed: anything that sums n terms, through an adapter that writes the terms and reads the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from isobit.errors import RevealError

# Told how far a stage has come: (stage, done, total).
Progress = Callable[[str, int, int], None]


class Terms(NamedTuple):
    """The n terms of one probe: `values` at `indices`, `fill` at the indices of `over`, zero elsewhere."""

    indices: tuple[int, ...]
    values: tuple[float, ...]
    fill: float = 0.0
    over: range = range(0)
    factor: float = 1.0  # what every term is multiplied by inside, where the target sums products


@dataclass(frozen=True)
class Scale:
    """Values that the target's dtype can hold: `big` absorbs up to `absorbed` units, in the widest accumulator."""

    big: float
    unit: float
    absorbed: int
    bits: int  # significand bits of a term as it is written
    subnormal: (
        float  # the smallest normal number is twice this; 0 where a result so small is not seen
    )
    lowest: int  # how far exponents of random terms may go below 1
    smallest: int  # the smallest number that a replay may use is 2^smallest
    largest: int  # and its largest exponent
    divided: bool = (
        False  # whether the sum is divided before it is read, by a number that may be inexact
    )


# 2^100 absorbs units in fp64 too. fp16 ends at 2^16, so its unit is its smallest number.
FP32 = Scale(2.0**100, 1.0, 2**24, 24, 2.0**-127, 60, -149, 127)
BF16 = Scale(2.0**100, 1.0, 2**24, 8, 2.0**-127, 60, -133, 127)
FP16 = Scale(2.0**15, 2.0**-24, 2**14, 11, 2.0**-15, 13, -24, 15)
# The smallest numbers would not survive a division, and whether the largest overflow depends on when it is made.
FP16_DIVIDED = Scale(2.0**15, 2.0**-14, 2**4, 11, 0.0, 13, -14, 5, True)


def divided(scale: Scale) -> Scale:
    """The same where the sum is divided before it is read."""
    return (
        FP16_DIVIDED
        if scale is FP16
        else replace(scale, subnormal=0.0, smallest=-60, largest=60, divided=True)
    )


class Target(Protocol):
    """One sum of `n` terms inside something, in one configuration of it."""

    @property
    def name(self) -> str:
        """What it is, for people."""

    @property
    def n(self) -> int:
        """How many terms."""

    @property
    def scale(self) -> Scale:
        """What values the terms can take."""

    @property
    def kind(self) -> str:
        """`sum` of the terms, `product` (terms times factors), or `positive` (only terms of zero or more)."""

    @property
    def output_bits(self) -> int:
        """Significand bits of the result as it is read; 0 where what follows the sum is not plain."""

    @property
    def scope(self) -> str:
        """Which of its sums is probed, where a result needs others too, or has other places; else empty."""

    @property
    def unlike(self) -> int:
        """How many places of a call were found to add otherwise than the one that is probed."""

    def sums(self, batch: Sequence[Terms]) -> Sequence[float]:
        """The sum of each."""

    @property
    def storage(self) -> str:
        """How the terms of replays are stored, for people: alignment, and strides."""

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> Sequence[float]:
        """The sum of these terms at every place where the target makes it."""

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> Sequence[Sequence[float]]:
        """For each vector of terms, every different sum that the target makes of it."""


def as_range(terms: Sequence[int]) -> range | None:
    """The same terms as a range, if they rise by equal steps."""
    if isinstance(terms, range):
        return terms
    if len(terms) < 2 or terms[1] <= terms[0]:
        return None
    steps = range(terms[0], terms[-1] + 1, terms[1] - terms[0])
    return (
        steps
        if len(steps) == len(terms) and all(a == b for a, b in zip(steps, terms, strict=True))
        else None
    )


@dataclass
class Session:
    """Probes a target, counts the probes, and tells how far it has come."""

    target: Target
    progress: Progress | None = None
    probes: int = 0
    window: int = 0  # how many units can be counted at once
    thorough: bool = (
        False  # whether all terms are counted for every pair, also where that takes many windows
    )

    BATCH = 4096

    def ask(self, batch: Sequence[Terms], stage: str) -> list[float]:
        """The sums, in order."""
        found: list[float] = []
        for at in range(0, len(batch), self.BATCH):
            found.extend(self.target.sums(batch[at : at + self.BATCH]))
            if self.progress is not None:
                self.progress(stage, len(found), len(batch))
        self.probes += len(batch)
        return found

    def find_window(self) -> None:
        """How many units the target counts exactly: all n, or a power of two of them at a time."""
        n, unit = self.target.n, self.target.scale.unit
        window = min(n, self.target.scale.absorbed)
        while True:
            counts = sorted({window, max(window - 1, 1), window // 2 + 1})
            batch = [
                Terms((), (), unit, range(start, start + c))
                for c in counts
                for start in sorted({0, n - c})
            ]
            wanted = [c for c in counts for _ in sorted({0, n - c})]
            found = self.ask(batch, "count")
            if all(value == unit * count for value, count in zip(found, wanted, strict=True)):
                self.window = window
                return
            if window == 1:
                break
            window = 1 << ((window - 1).bit_length() - 1)  # the next power of two below
        raise RevealError(
            expected=f"a sum: {wanted[0]} term(s) of {unit!r} give {unit * wanted[0]!r}",
            received=f"{found[0]!r} from {self.target.name}",
            remedy="it is not a sum of these terms as they are written and read; adapt how the target is wrapped",
        )

    def count_absorbed(
        self, requests: Sequence[tuple[tuple[int, int], Sequence[int]]], stage: str
    ) -> list[int]:
        """For each (pair, terms): how many of the terms are absorbed before the pair cancels, itself included."""
        values = self.ask([self._probe(pair, counted) for pair, counted in requests], stage)
        return [
            len(counted) - self._count(value, len(counted), pair)
            for value, (pair, counted) in zip(values, requests, strict=True)
        ]

    def sizes(
        self, pairs: Sequence[tuple[int, int]], among: Sequence[int], stage: str
    ) -> list[int]:
        """For each pair, how many of `among` are absorbed before it cancels: the terms of its smallest common sum."""
        windows = self.windows(among)
        found = self.count_absorbed([(pair, window) for window in windows for pair in pairs], stage)
        return [sum(found[at :: len(pairs)]) for at in range(len(pairs))]

    def windows(self, terms: Sequence[int]) -> list[Sequence[int]]:
        """Terms in runs that the target can count, as ranges where they rise by equal steps."""
        whole = as_range(terms) or tuple(terms)
        return [whole[at : at + self.window] for at in range(0, len(whole), self.window)]

    def _probe(self, pair: tuple[int, int], counted: Sequence[int]) -> Terms:
        scale = self.target.scale
        if isinstance(counted, range):
            return Terms(pair, (scale.big, -scale.big), scale.unit, counted)
        others = tuple(term for term in counted if term not in pair)
        return Terms(pair + others, (scale.big, -scale.big, *(scale.unit,) * len(others)))

    def _count(self, value: float, most: int, pair: tuple[int, int]) -> int:
        count = value / self.target.scale.unit
        if not (0 <= count <= most and count.is_integer()):
            raise RevealError(
                expected=f"a whole number of units from 0 to {most} where terms {pair[0]} and {pair[1]} cancel",
                received=f"{count!r} from {self.target.name}",
                remedy="it is not a plain sum of its terms, or its accumulator is narrower than its count showed",
            )
        return int(count)
