"""Predict sums in a revealed order, and compare them with the target on vectors of many kinds, to the bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from random import Random

from isobit.errors import RevealError
from isobit.order.addition import Branch, Step, chain, digest, steps_of
from isobit.order.evaluate import flush
from isobit.order.exact_sum import exact_sum, round_fp32
from isobit.reveal.arithmetic import WIDTHS, Arithmetic
from isobit.reveal.outline import describe, outline_of
from isobit.reveal.target import Scale, Session, Target
from isobit.reveal.vector_kinds import Space, draw_pairs, kinds_of

# Predict a sum: compute it in a revealed order with its revealed arithmetic, in plain Python.

# The smallest normal exponent of each width, and the largest number.
LOWEST = {8: -126, 11: -14, 24: -126, 53: -1022}
LARGEST = {8: (2 - 2.0**-7) * 2.0**127, 11: 65504.0}
BITS = struct.Struct("<q")
DOUBLE = struct.Struct("<d")


def round_to(value: float, bits: int) -> float:
    """Round an fp64 number to so many significand bits: ties to even, subnormals kept, overflow to infinity."""
    if bits == 24:
        return round_fp32(value)
    if bits == 53 or not math.isfinite(value):
        return value
    quantum = _quantum(value, bits)
    near = math.ldexp(round(math.ldexp(value, -quantum)), quantum)
    return math.copysign(near if abs(near) <= LARGEST[bits] else math.inf, value)


def is_near_tie(value: float, bits: int) -> bool:
    """Return whether a rounding to so many bits could go the other way if a divisor were off by 2^-14.

    Stock's bf16 attention divides by a sum of approximate exponentials, which is off by 2^-15 at equal weights.
    """
    if not math.isfinite(value) or bits >= 24:
        return False
    fraction, _ = math.modf(math.ldexp(abs(value), -_quantum(value, bits)))
    return abs(fraction - 0.5) < 2.0**-5


def cut(value: float, bits: int, how: str) -> float:
    """Round a fp32 number to fewer significand bits; a subnormal loses the same bits of its encoding."""
    quantum = _quantum(value, bits, LOWEST[24])
    scaled = math.ldexp(value, -quantum)
    near = math.trunc(scaled) if how.startswith("truncated") else round(scaled)
    return math.copysign(math.ldexp(near, quantum), value)


def _quantum(value: float, bits: int, lowest: int | None = None) -> int:
    """Return the exponent of the last place that is kept."""
    _, exponent = math.frexp(value)
    return max(exponent - 1, LOWEST[bits] if lowest is None else lowest) - bits + 1


def add_two_to_odd(a: float, b: float) -> float:
    """Return the sum in fp64 with its last bit set if inexact: a later rounding to fewer bits is then correct."""
    total = a + b
    there = total - a
    dropped = (a - (total - there)) + (b - there)
    return _make_odd(total, dropped) if dropped else total


def add_to_odd(operands: Sequence[float]) -> float:
    """Return `add_two_to_odd` of any number of operands."""
    if len(operands) == 2:
        return add_two_to_odd(*operands)
    total = exact_sum(operands)
    dropped = exact_sum([*operands, -total]) if math.isfinite(total) else 0.0
    return _make_odd(total, dropped) if dropped else total


def _make_odd(total: float, dropped: float) -> float:
    if not math.isfinite(total) or BITS.unpack(DOUBLE.pack(total))[0] & 1:
        return total
    return math.nextafter(total, math.copysign(math.inf, dropped))


# How an addition is computed: in fp64 and rounded; with the bits that fp64 drops; by `Plan.add`.
PLAIN, TO_ODD, OTHER = range(3)


class Plan:
    """The additions of one tree with its arithmetic, prepared for speed."""

    def __init__(self, steps: Sequence[Step], arithmetic: Arithmetic) -> None:
        """Choose how each addition is computed."""
        self.steps, self.arithmetic = steps, arithmetic
        widths = arithmetic.widths
        unrounded = arithmetic.products not in ("none", "rounded")

        def wide(child: int) -> bool:
            """Whether an operand may have more bits than fp32 holds."""
            return (
                widths[child] == 53
                if child >= 0
                else unrounded and ~child not in arithmetic.rounded
            )

        self.wide_sums = [any(c >= 0 and widths[c] == 53 for c in step) for step in steps]
        self.ways = [
            OTHER
            if width != 24 or len(step) != 2
            else PLAIN
            if not any(wide(child) for child in step)
            else OTHER
            if sums or arithmetic.passing
            else TO_ODD
            for step, width, sums in zip(steps, widths, self.wide_sums, strict=True)
        ]

    def add(self, at: int, operands: Sequence[float]) -> float:
        """Compute one addition that is not plain; `passing` decides how often it rounds."""
        width, passing = self.arithmetic.widths[at], self.arithmetic.passing
        if width == 53:
            return operands[0] + operands[1] if len(operands) == 2 else exact_sum(operands)
        pair = len(operands) == 2
        if passing == "through fp64" or (pair and self.wide_sums[at] and passing != "at once"):
            return round_to(exact_sum(operands) if not pair else operands[0] + operands[1], width)
        total = add_to_odd(operands)
        if pair and width < 24 and passing != "at once":
            total = round_fp32(total)
        return round_to(total, width)

    def sum(self, values: Sequence[float], factors: Sequence[float]) -> float:
        """Return the sum as the last addition leaves it; values and factors are finite."""
        terms = _entering(self.arithmetic, values, factors)
        keeps = self.arithmetic.keeps_subnormal_sums is not False
        sums: list[float] = []
        for at, (step, way) in enumerate(zip(self.steps, self.ways, strict=True)):
            if way == OTHER:
                total = self.add(
                    at, [terms[~child] if child < 0 else sums[child] for child in step]
                )
            else:
                left, right = step
                a = terms[~left] if left < 0 else sums[left]
                b = terms[~right] if right < 0 else sums[right]
                total = round_fp32(a + b if way == PLAIN else add_two_to_odd(a, b))
            sums.append(total if keeps else flush(total))
        return sums[-1]


def replay(
    steps: Sequence[Step],
    arithmetic: Arithmetic,
    values: Sequence[float],
    factors: Sequence[float],
    output_bits: int,
) -> float:
    """Return the sum, rounded to the output; values and factors are finite."""
    return round_to(Plan(steps, arithmetic).sum(values, factors), output_bits)


def _entering(
    arithmetic: Arithmetic, values: Sequence[float], factors: Sequence[float]
) -> list[float]:
    """Return the terms as they enter additions: cut, flushed, multiplied. fp64 holds fp32 products exactly."""
    terms, others = list(values), list(factors)
    if arithmetic.terms_cut_to is not None:
        terms = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in terms]
        if "factors" in arithmetic.cut_how:
            others = [cut(v, arithmetic.terms_cut_to, arithmetic.cut_how) for v in others]
    if arithmetic.keeps_subnormal_terms is False:
        terms, others = [flush(v) for v in terms], [flush(v) for v in others]
    if arithmetic.products == "none":
        return terms
    terms = [a * b for a, b in zip(terms, others, strict=True)]
    for at in arithmetic.rounded:
        terms[at] = round_fp32(terms[at])
        if arithmetic.keeps_subnormal_sums is False:
            terms[at] = flush(terms[at])
    return terms


# Replays: on vectors of many kinds, compare what a revealed order predicts with the target, to the bit.

WIDER = 6  # exponents beyond what an accumulator holds next to a term
# (up to so many terms, vectors of each kind): few additions round rarely, so short sums need more vectors.
A_KIND = ((64, 6), (1024, 2), (1 << 62, 1))
FUSED_TIMES = 4  # an exact addition of many terms is a strong claim
MORE = {"one scale": 3, "a tie alone": 3, "a tie and dust": 2}
FACTOR_SETS = 4
FACTORS = ((-3, 4), (-3, 4), (-12, 12), (0, 0))  # exponents of the factors of each set
# With these, products underflow and overflow fp32.
FAR_FACTORS = ((-3, 4), (-3, 4), (-70, -60), (55, 62))
GROUPS = 256
EVERYWHERE = 8  # vectors that are written to all places of a call


@dataclass(frozen=True)
class Trial:
    """One vector of terms, and the index of the factors it is used with."""

    kind: str
    values: tuple[float, ...]
    factors: int


@dataclass(frozen=True)
class Replayed:
    """The vectors that a revealed tree was replayed on."""

    vectors: int = 0
    kinds: tuple[str, ...] = ()
    exponents: tuple[int, int] = (0, 0)  # of the terms
    storage: str = ""

    def __str__(self) -> str:
        """Describe the vectors in one line."""
        if not self.vectors:
            return "not replayed"
        low, high = self.exponents
        stored = f", {self.storage}" if self.storage else ""
        return (
            f"{self.vectors} vectors of {len(self.kinds)} kinds, exponents {low} to {high}{stored}"
        )


NOT_REPLAYED = Replayed()


def check_replays(
    session: Session, branch: Branch, arithmetic: Arithmetic
) -> tuple[Arithmetic, Replayed]:
    """Compare the target with what its order and arithmetic predict, on vectors of every kind.

    What probing leaves open is settled here: the variant of the arithmetic that predicts every sum is returned.
    Nothing counts as replayed where a chain in another order would have given the same bits.

    Raises:
        RevealError: No variant predicts every sum.
    """
    target, steps = session.target, steps_of(branch)
    question, order = _ask_about(target, steps, arithmetic), _Order(branch)
    trials, factors = _draw(question)
    found = _ask(session, trials, factors)
    furthest, at = predictions(order, arithmetic, question, target.output_bits), -1
    for variant in _variants(arithmetic, steps):
        predicted = predictions(order, variant, question, target.output_bits)
        wrong = _first_wrong(predicted, found)
        if wrong is None:
            if target.n > 2 and not _separates_orders(order, variant, question, predicted):
                return variant, NOT_REPLAYED
            kinds = tuple(dict.fromkeys(trial.kind for trial in trials))
            reach = (target.scale.smallest, target.scale.largest)
            return variant, Replayed(len(trials), kinds, reach, target.storage)
        if wrong > at:
            furthest, at = predicted, wrong
    raise RevealError(
        expected=f"{furthest[at]!r} for {target.n} terms ({trials[at].kind}), by the order that probing showed "
        f"({describe(outline_of(branch))}; {furthest.arithmetic})",
        received=f"{sorted(set(found[at]))} from {target.name}",
        remedy="it is not a tree of additions: it may compensate, branch on its data, depend on the alignment of its "
        "storage, or its places may differ; pass arithmetic=False for the order that probing found, without a claim "
        "about bits",
    )


def same(got: float | None, want: float | None) -> bool:
    """Return whether two sums are equal numbers or both NaN; None, which is not predicted, equals everything."""
    return got == want or got is None or want is None or (got != got and want != want)


def _ask_about(target: Target, steps: Sequence[Step], arithmetic: Arithmetic) -> _Question:
    spread = max(arithmetic.widths) - (arithmetic.terms_cut_to or target.scale.bits) + WIDER
    return _Question(
        target.n,
        target.scale,
        max(min(spread, target.scale.lowest), 4),
        tuple(sorted(set(arithmetic.widths))),
        _fused_groups(steps),
        arithmetic.products != "none",
    )


@dataclass(frozen=True)
class _Question:
    """Everything that the vectors depend on; configurations of one kernel share it and the vectors."""

    n: int
    scale: Scale
    spread: int
    widths: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    products: bool


def _fused_groups(steps: Sequence[Step]) -> tuple[tuple[int, ...], ...]:
    """Return a term under each operand of each fused addition; no term is in two groups if that leaves two."""
    some: list[int] = []
    groups: list[tuple[int, ...]] = []
    used: set[int] = set()
    for step in steps:
        terms = [~child if child < 0 else some[child] for child in step]
        some.append(terms[-1])
        if len(step) > 2:
            fresh = [term for term in terms if term not in used]
            group = tuple(fresh if len(fresh) > 1 else terms)
            used.update(group)
            groups.append(group)
    return tuple(groups[:: -(-len(groups) // GROUPS) or 1])


@lru_cache(maxsize=4)
def _draw(question: _Question) -> tuple[list[Trial], list[list[float]]]:
    """Draw vectors of every kind, sorted by their factors; factors are empty if no products are summed."""
    random, n = Random(question.n), question.n
    sets = FACTOR_SETS if question.products else 1
    pairs = [draw_pairs(random, n, question.groups) for _ in range(sets)]
    factors = [_draw_factors(random, question, at, pairs[at]) for at in range(sets)]
    count = next(each for most, each in A_KIND if n <= most) * (
        FUSED_TIMES if question.groups else 1
    )
    trials: list[Trial] = []
    for kind, make in kinds_of(question.scale, bool(question.groups)).items():
        for turn in range(count * MORE.get(kind, 1)):
            at = len(trials) % sets
            chosen = pairs[at] if question.products else draw_pairs(random, n, question.groups)
            space = Space(
                random,
                n,
                question.scale,
                chosen,
                question.groups,
                question.spread,
                question.widths,
                turn,
            )
            trials.append(Trial(kind, tuple(make(space)), at))
    return sorted(trials, key=lambda trial: trial.factors), factors


def _draw_factors(
    random: Random, question: _Question, at: int, pairs: list[tuple[int, int]]
) -> list[float]:
    """Draw factors, equal where terms cancel."""
    if not question.products:
        return []
    low, high = (FAR_FACTORS if question.scale.largest > 100 else FACTORS)[at]
    values = Space(random, question.n, question.scale, [], (), 0, (), 0).between(low, high)
    for i, j in pairs:
        values[j] = values[i]
    return values


def _ask(
    session: Session, trials: Sequence[Trial], factors: Sequence[Sequence[float]]
) -> list[Sequence[float]]:
    """Return the target's sums of each vector; the first ones also at all places of one call."""
    target, found = session.target, list[Sequence[float]]()
    for at, known in enumerate(factors):
        mine = [trial for trial in trials if trial.factors == at]
        if session.progress is not None:
            session.progress("replay", len(found), len(trials))
        given = target.replay_batch([trial.values for trial in mine], known)
        for first, (trial, sums) in enumerate(zip(mine, given, strict=True)):
            everywhere = (
                target.replay(trial.values, known) if first < EVERYWHERE // len(factors) else ()
            )
            found.append([*sums, *everywhere])
    return found


class Predictions:
    """The sums that one order with one arithmetic predicts for the vectors of a question, computed lazily."""

    def __init__(
        self, order: _Order, arithmetic: Arithmetic, question: _Question, output_bits: int
    ) -> None:
        """Prepare predictions; nothing is computed yet."""
        self.arithmetic, self.question, self.output_bits = arithmetic, question, output_bits
        self._plan = Plan(order.steps, arithmetic)
        self._known: dict[int, float | None] = {}

    def __getitem__(self, at: int) -> float | None:
        """Return the predicted sum; None if a division after the sum may decide a tie of the output."""
        if at not in self._known:
            trials, factors = _draw(self.question)
            self._known[at] = self._read(
                self._plan.sum(trials[at].values, factors[trials[at].factors])
            )
        return self._known[at]

    def _read(self, total: float) -> float | None:
        if self.question.scale.divided and is_near_tie(total, self.output_bits):
            return None
        return round_to(total, self.output_bits)


class _Order:
    """The steps of a tree, compared by digest: nested tuples are too deep to be hashed."""

    def __init__(self, branch: Branch) -> None:
        self.steps, self.digest = steps_of(branch), digest(branch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Order) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


predictions = lru_cache(maxsize=16)(Predictions)  # configurations of one kernel have the same


def _first_wrong(predicted: Predictions, found: Sequence[Sequence[float]]) -> int | None:
    for at, sums in enumerate(found):
        want = predicted[at]
        if not all(same(got, want) for got in sums):
            return at
    return None


def _variants(arithmetic: Arithmetic, steps: Sequence[Step]) -> Iterator[Arithmetic]:
    """Yield what probing leaves open: the last addition's width, how terms are cut, double roundings."""
    hows = [""]
    if arithmetic.terms_cut_to is not None:
        sides = ("", ", factors too") if arithmetic.products != "none" else ("",)
        hows = [how + side for side in sides for how in ("truncated", "rounded")]
    passings = [""]
    if arithmetic.products != "none" or any(len(step) > 2 for step in steps):
        passings.append("through fp64")
    if len(set(arithmetic.widths)) > 1:
        passings.append("at once")
    lasts = dict.fromkeys((arithmetic.widths[-1], 24, *WIDTHS))
    for passing, how, last in product(passings, hows, lasts):
        yield replace(
            arithmetic, cut_how=how, widths=(*arithmetic.widths[:-1], last), passing=passing
        )


def _separates_orders(
    order: _Order, arithmetic: Arithmetic, question: _Question, predicted: Predictions
) -> bool:
    """Return whether a chain in another order would have been caught."""
    n, random = question.n, Random(question.n)
    terms = list(range(n))
    random.shuffle(terms)
    while (other := _Order(chain(terms))) == order:
        random.shuffle(terms)
    same_widths = replace(arithmetic, widths=(arithmetic.widths[-1],) * (n - 1))
    shuffled = Predictions(other, same_widths, question, predicted.output_bits)
    return any(not same(shuffled[at], predicted[at]) for at in range(len(_draw(question)[0])))
