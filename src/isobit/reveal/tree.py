"""Reveals the order in which a black box adds and what its additions do, then replays it to see that all was seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from blake3 import blake3

from isobit.errors import ArgumentError, RevealError
from isobit.order.addition import Branch, depth_of, digest, write_formula
from isobit.reveal import cancelling_probe, positive_probe
from isobit.reveal.arithmetic import Arithmetic, find_arithmetic
from isobit.reveal.number_space import Space, draw_pairs
from isobit.reveal.outline import Outline, describe, outline_of
from isobit.reveal.target import Progress, Session, Target
from isobit.reveal.trials import NOT_REPLAYED, WIDER, Replayed, check_replays

FORMULA_TERMS = 8


@dataclass(frozen=True, eq=False)
class Tree:
    """The order of one sum: `branch` nests the terms' indices as they are added; `arithmetic` is None if not seen."""

    name: str
    n: int
    branch: Branch
    arithmetic: Arithmetic | None = None
    probes: int = 0
    replays: Replayed = (
        NOT_REPLAYED  # vectors whose sums the order and the arithmetic predicted to the bit
    )
    scope: str = ""  # which of the target's sums it is, where there are others
    unlike: int = 0  # places of a call that add otherwise

    @property
    def replayed(self) -> int:
        """How many vectors were replayed."""
        return self.replays.vectors

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
        raise ArgumentError(
            expected="a sum of at least one term",
            received=f"n = {target.n}",
            remedy="choose n >= 1",
        )
    session = Session(target, progress)
    if target.kind == "positive":
        branch = positive_probe.find_tree(session)
        return Tree(
            target.name,
            target.n,
            branch,
            None,
            session.probes,
            NOT_REPLAYED,
            target.scope,
            target.unlike,
        )
    random = Random(target.n)
    _check_repeatable(target, random)
    session.find_window()
    branch = cancelling_probe.find_tree(session)
    if not arithmetic or not target.output_bits or target.n < 2:
        return Tree(
            target.name,
            target.n,
            branch,
            None,
            session.probes,
            NOT_REPLAYED,
            target.scope,
            target.unlike,
        )
    found = find_arithmetic(session, branch)
    found, replays = check_replays(session, branch, found)
    return Tree(
        target.name, target.n, branch, found, session.probes, replays, target.scope, target.unlike
    )


def _check_repeatable(target: Target, random: Random) -> None:
    """The same terms twice must give the same bits; terms that cancel, so that a change of order would show."""
    pairs = draw_pairs(random, target.n, ())
    space = Space(random, target.n, target.scale, pairs, (), 0, (), 0)
    low = -min(WIDER, target.scale.lowest)
    values, factors = space.cancel(space.between(low, 4)), space.between(low, 4)
    for i, j in pairs:
        factors[j] = factors[i]
    first, second = (target.replay(values, factors) for _ in range(2))
    if repr(first) != repr(second):
        raise RevealError(
            expected="the same bits for the same terms",
            received=f"{first}, then {second}, from {target.name}",
            remedy="it is not repeatable, so it has no one order: fix threads, atomics or seeds first",
        )
