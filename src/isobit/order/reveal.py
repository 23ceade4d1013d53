"""Reveals the order in which a black box adds and what its additions do, then replays it to see that all was seen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from blake3 import blake3

from isobit.errors import ArgumentError, RevealError
from isobit.order import signed, triples
from isobit.order.addition import Branch, chain, depth_of, digest, steps_of, write_formula
from isobit.order.arithmetic import WIDTHS, Arithmetic, find_arithmetic
from isobit.order.outline import Outline, describe, outline_of
from isobit.order.replay import replay
from isobit.order.target import Progress, Session, Target

REPLAYS, FEW_TERMS = 8, 64
WIDER = 6  # exponents beyond what the accumulator holds beside a term
Trial = tuple[list[float], list[float], Sequence[float]]
FORMULA_TERMS = 8


@dataclass(frozen=True, eq=False)
class Tree:
    """The order of one sum: `branch` nests the terms' indices as they are added; `arithmetic` is None if not seen."""

    name: str
    n: int
    branch: Branch
    arithmetic: Arithmetic | None = None
    probes: int = 0
    replayed: int = 0  # sums of random terms that the order and the arithmetic foretold to the bit
    scope: str = ""  # which of the target's sums it is, where there are others
    unlike: int = 0  # places of a call that add otherwise

    @cached_property
    def order_digest(self) -> str:
        """BLAKE3 of the order alone."""
        return digest(self.branch)

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of order and arithmetic."""
        if self.arithmetic is None:
            return self.order_digest
        return blake3(bytes.fromhex(self.order_digest) + self.arithmetic.digest).hexdigest()[:32]

    @cached_property
    def outline(self) -> Outline:
        """The order with its regular runs collapsed."""
        return outline_of(self.branch)

    @property
    def depth(self) -> int:
        """The most additions that one term goes through."""
        return depth_of(self.branch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        """What a person would say of it; of a few terms that follow no pattern, the formula."""
        few = self.n <= FORMULA_TERMS and len(self.outline.runs) > 1
        return write_formula(self.branch) if few else describe(self.outline)

    def __repr__(self) -> str:
        return f"Tree({self.name}: {self}; digest {self.digest[:8]})"


def reveal(target: Target, *, arithmetic: bool = True, progress: Progress | None = None) -> Tree:
    """The order in which the target adds its terms; with `arithmetic`, what each addition does, replayed.

    Raises RevealError where the target is not a sum, is not repeatable, or is not a plain tree of additions.
    """
    if target.n < 1:
        raise ArgumentError(expected="a sum of at least one term", received=f"n = {target.n}", remedy="choose n >= 1")
    session = Session(target, progress)
    if target.kind == "positive":
        branch = triples.find_tree(session)
        return Tree(target.name, target.n, branch, None, session.probes, 0, target.scope, target.unlike)
    random = Random(target.n)
    _check_repeatable(target, random)
    session.find_window()
    branch = signed.find_tree(session)
    if not arithmetic or not target.output_bits or target.n < 2:
        return Tree(target.name, target.n, branch, None, session.probes, 0, target.scope, target.unlike)
    found = find_arithmetic(session, branch)
    found, replayed = _replay(session, branch, found, random)
    return Tree(target.name, target.n, branch, found, session.probes, replayed, target.scope, target.unlike)


def _check_repeatable(target: Target, random: Random) -> None:
    """The same terms twice must give the same bits; terms that cancel, so that a change of order would show."""
    values, factors = (_draw(random, target.n, target.scale.bits, -min(WIDER, target.scale.lowest)) for _ in range(2))
    _cancel(random, values, factors)
    first, second = (target.replay(values, factors) for _ in range(2))
    if repr(first) != repr(second):
        raise RevealError(
            expected="the same bits for the same terms",
            received=f"{first}, then {second}, from {target.name}",
            remedy="it is not repeatable, so it has no one order: fix threads, atomics or seeds first",
        )


def _replay(session: Session, branch: Branch, arithmetic: Arithmetic, random: Random) -> tuple[Arithmetic, int]:
    """The arithmetic, what could not be probed settled by what it foretells; and how many sums it foretold.

    None, where another order would have given the same bits: such a replay shows nothing.
    """
    target, steps = session.target, steps_of(branch)
    if any(len(step) > 2 for step in steps) and arithmetic.products != "none":
        return arithmetic, 0  # what a fused addition of products keeps is not known
    products = arithmetic.products != "none"
    spread = max(arithmetic.widths) - (arithmetic.terms_cut_to or target.scale.bits) + WIDER
    count = REPLAYS if target.n > FEW_TERMS else 4 * REPLAYS  # few additions round seldom
    trials = []
    for trial in range(count):
        if session.progress is not None:
            session.progress("replay", trial, count)
        wide, cancels = trial >= count // 2, trial % 2 == 1
        low = -min(spread, target.scale.lowest) if wide else -3
        high = 10 if wide and trial % 4 == 3 and min(arithmetic.widths) >= 24 else 4  # where nothing large is left
        values = _draw(random, target.n, target.scale.bits, low, high)
        factors = _draw(random, target.n, target.scale.bits, low) if products else []
        if cancels:
            _cancel(random, values, factors)
        trials.append((values, factors, target.replay(values, factors)))
    first: tuple[list[float], Arithmetic] | None = None
    for variant in _variants(arithmetic, products):
        wanted = [replay(steps, variant, v, f, target.output_bits) for v, f, _ in trials]
        if all(got == [want] for want, (_, _, got) in zip(wanted, trials, strict=True)):
            told = target.n == 2 or _tells_orders_apart(digest(branch), variant, trials, wanted, target, random)
            return variant, count if told else 0
        first = first or (wanted, variant)
    assert first is not None
    at = next(at for at, (want, (_, _, got)) in enumerate(zip(first[0], trials, strict=True)) if got != [want])
    raise RevealError(
        expected=f"{first[0][at]!r} for {target.n} random terms, by the order that probing showed "
        f"({describe(outline_of(branch))}; {first[1]})",
        received=f"{trials[at][2]} from {target.name}",
        remedy="it is not a plain tree of additions (it may compensate, or its places may differ); "
        "arithmetic=False shows the order that probing saw, and claims nothing of the bits",
    )


def _variants(arithmetic: Arithmetic, products: bool) -> Iterator[Arithmetic]:
    """What probing leaves open: the width of the last addition, and how terms are cut."""
    hows = [""]
    if arithmetic.terms_cut_to is not None:
        sides = ("", ", factors too") if products else ("",)
        hows = [how + side for side in sides for how in ("truncated", "rounded")]
    for how in hows:
        for last in dict.fromkeys((arithmetic.widths[-1], 24, *WIDTHS)):
            yield replace(arithmetic, cut_how=how, widths=(*arithmetic.widths[:-1], last))


def _tells_orders_apart(
    known: str, arithmetic: Arithmetic, trials: list[Trial], wanted: list[float], target: Target, random: Random
) -> bool:
    """Whether a chain in another order would have been caught."""
    order, branch = list(range(target.n)), chain(range(target.n))
    while digest(branch) in (known, digest(chain(range(target.n)))):
        random.shuffle(order)
        branch = chain(order)
    steps = steps_of(branch)
    other = replace(arithmetic, widths=(arithmetic.widths[-1],) * len(steps))
    found = (replay(steps, other, values, factors, target.output_bits) for values, factors, _ in trials)
    return any(value != want for value, want in zip(found, wanted, strict=True))


def _draw(random: Random, n: int, bits: int, low: int, high: int = 4) -> list[float]:
    """Either sign, full mantissas, exponents from `low` to `high`."""
    top, bit, room = 1 << (bits - 1), random.getrandbits, high + 1 - low
    return [
        math.ldexp((bit(bits - 1) | top) * (1 if e & 1 else -1), low + (e >> 1) % room - bits)
        for e in (bit(16) for _ in range(n))
    ]


def _cancel(random: Random, values: list[float], factors: list[float]) -> None:
    """Half the terms are the other half, negated, elsewhere; one that is left over is as small as the smallest."""
    places = list(range(len(values)))
    random.shuffle(places)
    for i, j in zip(places[0::2], places[1::2], strict=False):
        values[j] = -values[i]
        if factors:
            factors[j] = factors[i]
    if len(places) % 2:
        values[places[-1]] = min(values, key=abs)
