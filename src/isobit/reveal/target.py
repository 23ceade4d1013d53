"""What can be probed: `Target`, the protocol of a sum of n terms, and `Session`, which sends probes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from isobit.errors import RevealError

# Called with (stage, done, total).
Progress = Callable[[str, int, int], None]


class Terms(NamedTuple):
    """The n terms of one probe: `values` at `indices`, `fill` at the indices of `over`, zero elsewhere."""

    indices: tuple[int, ...]
    values: tuple[float, ...]
    fill: float = 0.0
    over: range = range(0)
    factor: float = 1.0  # every term is multiplied by it, if the target sums products


@dataclass(frozen=True)
class Scale:
    """Values of the target's dtype: `big` absorbs up to `absorbed` units in the widest accumulator."""

    big: float
    unit: float
    absorbed: int
    bits: int  # significand bits of a term as it is written
    subnormal: float  # half the smallest normal number; 0 if a result so small cannot be read
    lowest: int  # random terms have exponents from -lowest
    smallest: int  # the exponent of the smallest number that a replay uses
    largest: int  # the exponent of the largest one
    divided: bool = False  # whether the sum is divided, perhaps inexactly, before it is read


# 2^100 absorbs units in fp64 too. fp16 ends at 2^16, so its unit is its smallest number.
FP32 = Scale(2.0**100, 1.0, 2**24, 24, 2.0**-127, 60, -149, 127)
BF16 = Scale(2.0**100, 1.0, 2**24, 8, 2.0**-127, 60, -133, 127)
FP16 = Scale(2.0**15, 2.0**-24, 2**14, 11, 2.0**-15, 13, -24, 15)
# A division would flush the smallest numbers, and the largest might overflow before it.
FP16_DIVIDED = Scale(2.0**15, 2.0**-14, 2**4, 11, 0.0, 13, -14, 5, True)


def divided(scale: Scale) -> Scale:
    """Return the scale of a sum that is divided before it is read."""
    if scale is FP16:
        return FP16_DIVIDED
    return replace(scale, subnormal=0.0, smallest=-60, largest=60, divided=True)


class Target(Protocol):
    """One sum of `n` terms in one configuration of a kernel."""

    @property
    def name(self) -> str:
        """A name for reports."""

    @property
    def n(self) -> int:
        """The number of terms."""

    @property
    def scale(self) -> Scale:
        """The values that terms can have."""

    @property
    def kind(self) -> str:
        """`sum` of the terms, `product` (terms times factors), or `positive` (only terms of zero or more)."""

    @property
    def output_bits(self) -> int:
        """Significand bits of the result as it is read; 0 if more than a rounding follows the sum."""

    @property
    def scope(self) -> str:
        """Which of the sums is probed, if a result needs several or has several places; else empty."""

    @property
    def unlike(self) -> int:
        """The number of places of a call that add in another order than the probed one."""

    def sums(self, batch: Sequence[Terms]) -> Sequence[float]:
        """Return the sum of each probe."""

    @property
    def storage(self) -> str:
        """How the terms of replays are stored: alignment and strides, for reports."""

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> Sequence[float]:
        """Return the sum of these terms at every place where the target computes it."""

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> Sequence[Sequence[float]]:
        """Return for each vector every different sum that the target computes of it."""


def as_range(terms: Sequence[int]) -> range | None:
    """Return the terms as a range, if they rise by equal steps."""
    if isinstance(terms, range):
        return terms
    if len(terms) < 2 or terms[1] <= terms[0]:
        return None
    steps = range(terms[0], terms[-1] + 1, terms[1] - terms[0])
    return steps if list(steps) == list(terms) else None


@dataclass
class Session:
    """Sends probes to a target, counts them, and reports progress."""

    target: Target
    progress: Progress | None = None
    probes: int = 0
    window: int = 0  # how many units can be counted at once
    thorough: bool = False  # count all terms for every pair, even if that takes many windows
    heard: list[tuple[Terms, float]] = field(default_factory=list)  # every probe and its answer

    BATCH = 4096

    def ask(self, batch: Sequence[Terms], stage: str) -> list[float]:
        """Return the sums of the probes, in order."""
        found: list[float] = []
        for at in range(0, len(batch), self.BATCH):
            found.extend(self.target.sums(batch[at : at + self.BATCH]))
            if self.progress is not None:
                self.progress(stage, len(found), len(batch))
        self.probes += len(batch)
        self.heard += zip(batch, found, strict=True)
        return found

    def find_window(self) -> None:
        """Find how many units the target counts exactly: all n, or a power of two at a time."""
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
            remedy="it does not sum these terms as they are written and read: change how it is wrapped",
        )

    def count_absorbed(
        self, requests: Sequence[tuple[tuple[int, int], Sequence[int]]], stage: str
    ) -> list[int]:
        """Return for each (pair, terms) how many terms are absorbed before the pair cancels, the pair included."""
        values = self.ask([self._probe(pair, counted) for pair, counted in requests], stage)
        return [
            len(counted) - self._count(value, len(counted), pair)
            for value, (pair, counted) in zip(values, requests, strict=True)
        ]

    def sizes(
        self, pairs: Sequence[tuple[int, int]], among: Sequence[int], stage: str
    ) -> list[int]:
        """Return for each pair how many of `among` are absorbed before it cancels: the size of its common sum."""
        windows = self.windows(among)
        found = self.count_absorbed([(pair, window) for window in windows for pair in pairs], stage)
        return [sum(found[at :: len(pairs)]) for at in range(len(pairs))]

    def windows(self, terms: Sequence[int]) -> list[Sequence[int]]:
        """Cut terms into runs that the target can count, as ranges if they rise by equal steps."""
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
