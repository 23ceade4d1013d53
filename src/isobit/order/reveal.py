"""Reveals the order in which a black box adds and what its additions do, then replays it to see that all was seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from random import Random

from blake3 import blake3

from isobit.errors import ArgumentError, RevealError
from isobit.order import signed, triples
from isobit.order.addition import Branch, depth_of, digest, steps_of, write_formula
from isobit.order.arithmetic import Arithmetic, find_arithmetic
from isobit.order.outline import Outline, describe, outline_of
from isobit.order.replay import replay
from isobit.order.target import Progress, Session, Target, Terms

REPLAYS = 8
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
        return Tree(target.name, target.n, triples.find_tree(session), probes=session.probes)
    random = Random(target.n)
    unit = target.scale.unit
    session.check_repeatable([Terms((random.randrange(target.n),), (3 * unit,), unit, range(target.n))])
    session.find_window()
    branch = signed.find_tree(session)
    if not arithmetic or not target.output_bits or target.n < 2:
        return Tree(target.name, target.n, branch, probes=session.probes)
    found = find_arithmetic(session, branch)
    replayed = _replay(session, branch, found, random)
    return Tree(target.name, target.n, branch, found, session.probes, replayed)


def _replay(session: Session, branch: Branch, arithmetic: Arithmetic, random: Random) -> int:
    """Random terms of full mantissas; in every second replay they cancel, so that only rounding errors are left."""
    target, steps, count = session.target, steps_of(branch), 0
    if any(len(step) > 2 for step in steps) and arithmetic.products != "none":
        return 0  # what a fused addition of products keeps is not known
    products = arithmetic.products != "none"
    bits = arithmetic.terms_cut_to or target.scale.bits
    for trial in range(REPLAYS):
        values = _draw(random, target.n, bits)
        factors = _draw(random, target.n, bits) if products else []
        if trial % 2:
            _cancel(random, values, factors)
        if session.progress is not None:
            session.progress("replay", trial, REPLAYS)
        wanted = replay(steps, arithmetic, values, factors, target.output_bits)
        for got in target.replay(values, factors):
            count += 1
            if got != wanted:
                raise RevealError(
                    expected=f"{wanted!r} for {target.n} random terms, by the order that probing showed "
                    f"({describe(outline_of(branch))}; {arithmetic})",
                    received=f"{got!r} from {target.name}",
                    remedy="it is not a plain tree of additions (it may compensate, or its places may differ); "
                    "arithmetic=False shows the order that probing saw, and claims nothing of the bits",
                )
    return count


def _draw(random: Random, n: int, bits: int) -> list[float]:
    """Either sign, full mantissas, exponents from -3 to 4."""
    top, bit = 1 << (bits - 1), random.getrandbits
    return [
        math.ldexp((bit(bits - 1) | top) * (1 if e & 8 else -1), (e & 7) - 3 - bits) for e in (bit(4) for _ in range(n))
    ]


def _cancel(random: Random, values: list[float], factors: list[float]) -> None:
    """Half the terms are the other half, negated, elsewhere."""
    places = list(range(len(values)))
    random.shuffle(places)
    for i, j in zip(places[0::2], places[1::2], strict=False):
        values[j] = -values[i]
        if factors:
            factors[j] = factors[i]


