"""`Tree`, the order of one sum, and `reveal`, which finds it by probing and checks it by replaying."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from blake3 import blake3

from isobit.errors import ArgumentError, RevealError
from isobit.order.addition import Branch, depth_of, digest, write_formula
from isobit.reveal import cancelling_probe, positive_probe
from isobit.reveal.arithmetic import Arithmetic, find_arithmetic
from isobit.reveal.outline import Outline, describe, outline_of
from isobit.reveal.replays import NOT_REPLAYED, WIDER, Replayed, check_replays
from isobit.reveal.target import Progress, Scale, Session, Target, Terms
from isobit.reveal.vector_kinds import Space, draw_pairs

# Ask the probes of an earlier configuration again, all at once, instead of searching for the tree
# anew.
#
# [Note: asking again]
# The search for a tree and its arithmetic is a function of the target's answers and of nothing
# else: its random numbers are seeded by the number of terms. So if another configuration gives the
# same answers, bit for bit, to all probes of the first, then a search of its own would ask the same
# probes and find the same tree. Asking is cheaper: no probe waits for the answer to another, so
# that a call holds as many as it has places. If one answer differs, nothing is concluded, and the
# search runs. Replays are never taken from another configuration.

DOUBLE = 8  # bytes of an answer
# Everything besides the answers that the search reads of a target.
Kind = tuple[str, int, Scale, int]


@dataclass(frozen=True)
class Transcript:
    """The probes of one search, its answers as raw bits, and what it found."""

    probes: tuple[Terms, ...]
    answers: bytes
    branch: Branch
    arithmetic: Arithmetic | None


class Transcripts:
    """The first search of each kind of target, for the configurations of one kernel.

    All of them are searched for the order alone, or all for the arithmetic too.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._kept: dict[Kind, Transcript] = {}

    def keep(self, session: Session, branch: Branch, arithmetic: Arithmetic | None) -> None:
        """Keep what a search asked and found; probes of one fill and factor come together, for one call."""
        asked = sorted(session.heard, key=_by_call)
        answers = _raw([answer for _, answer in asked])
        found = Transcript(tuple(probe for probe, _ in asked), answers, branch, arithmetic)
        self._kept.setdefault(_kind_of(session.target), found)

    def ask_again(self, session: Session) -> Transcript | None:
        """Ask the probes of the first search; return it if every answer has the same bits, else None."""
        known = self._kept.get(_kind_of(session.target))
        if known is None:
            return None
        asked = Session(session.target, session.progress)
        for at in range(0, len(known.probes), Session.BATCH):
            some = known.probes[at : at + Session.BATCH]
            try:
                answers = _raw(asked.ask(some, "order"))
            except RevealError:  # which a search of its own may not meet
                return None
            if answers != known.answers[at * DOUBLE : (at + len(some)) * DOUBLE]:
                return None
        session.probes += asked.probes
        return known


def _kind_of(target: Target) -> Kind:
    return target.kind, target.n, target.scale, target.output_bits


def _by_call(heard: tuple[Terms, float]) -> tuple[float, float, int, int, int]:
    probe = heard[0]
    return probe.factor, probe.fill, probe.over.start, probe.over.stop, probe.over.step


def _raw(answers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(answers)}d", *answers)


FORMULA_TERMS = 8


@dataclass(frozen=True, eq=False)
class Tree:
    """The order in which one sum adds its terms, as `isobit.reveal.order` returns it.

    Two trees are equal if order and arithmetic are: then the sums have equal bits for all finite inputs, if the
    kernels do not branch on them.

    Attributes:
        name: what was probed.
        n: the number of terms.
        branch: the order as nested tuples of term indices; a tuple is one addition.
        arithmetic: what the additions do; None if it was not probed.
        probes: how many probes were made.
        replays: the vectors whose sums order and arithmetic predicted to the bit.
        scope: which of the target's sums this is, if there are others.
        unlike: how many places of a call add in another order.

    Example:
        >>> from isobit.reveal import Tree
        >>> tree = Tree("example", 4, ((0, 1), (2, 3)))
        >>> print(tree, tree.depth)
        4 in pairs 2
        >>> tree == Tree("other name", 4, ((0, 1), (2, 3)))
        True
    """

    name: str
    n: int
    branch: Branch
    arithmetic: Arithmetic | None = None
    probes: int = 0
    replays: Replayed = NOT_REPLAYED
    scope: str = ""
    unlike: int = 0

    @property
    def replayed(self) -> int:
        """The number of vectors that were replayed."""
        return self.replays.vectors

    @cached_property
    def order_digest(self) -> str:
        """The BLAKE3 digest of the order alone."""
        return digest(self.branch)

    @cached_property
    def digest(self) -> str:
        """The BLAKE3 digest of order and arithmetic."""
        if self.arithmetic is None:
            return self.order_digest
        return blake3(bytes.fromhex(self.order_digest) + self.arithmetic.digest).hexdigest()[:32]

    @cached_property
    def outline(self) -> Outline:
        """The order with its regular runs collapsed, as pictures show it."""
        return outline_of(self.branch)

    @property
    def depth(self) -> int:
        """The most additions that one term passes."""
        return depth_of(self.branch)

    def __eq__(self, other: object) -> bool:
        """Compare order and arithmetic."""
        return isinstance(other, Tree) and self.digest == other.digest

    def __hash__(self) -> int:
        """Hash order and arithmetic."""
        return hash(self.digest)

    def __str__(self) -> str:
        """Describe the order in one line; a few terms without a pattern are written as a formula."""
        few = self.n <= FORMULA_TERMS and len(self.outline.runs) > 1
        return write_formula(self.branch) if few else describe(self.outline)

    def __repr__(self) -> str:
        """Show name, order and digest."""
        return f"Tree({self.name}: {self}; digest {self.digest[:8]})"


def reveal(
    target: Target,
    *,
    arithmetic: bool = True,
    progress: Progress | None = None,
    earlier: Transcripts | None = None,
) -> Tree:
    """Find the order in which the target adds its terms; with `arithmetic`, probe and replay the additions too.

    With `earlier`, which configurations of one kernel share, a target that answers like the first is not searched anew.

    Raises:
        ArgumentError: The target has no terms.
        RevealError: It is not a sum, is not repeatable, or is not a tree of additions.
    """
    if target.n < 1:
        raise ArgumentError(
            expected="a sum of at least one term",
            received=f"n = {target.n}",
            remedy="choose n >= 1",
        )
    session = Session(target, progress)

    def found(
        branch: Branch, arithmetic: Arithmetic | None = None, replays: Replayed = NOT_REPLAYED
    ) -> Tree:
        probed = arithmetic, session.probes, replays
        return Tree(target.name, target.n, branch, *probed, target.scope, target.unlike)

    if target.kind == "positive":
        return found(positive_probe.find_tree(session))
    _check_repeatable(target, Random(target.n))
    known = None if earlier is None else earlier.ask_again(session)
    if known is not None:
        branch, probed = known.branch, known.arithmetic
    else:
        session.find_window()
        branch = cancelling_probe.find_tree(session)
        adds = arithmetic and target.output_bits and target.n > 1
        probed = find_arithmetic(session, branch) if adds else None
        if earlier is not None:
            earlier.keep(session, branch, probed)
    if probed is None or not arithmetic:
        return found(branch)
    return found(branch, *check_replays(session, branch, probed))


def _check_repeatable(target: Target, random: Random) -> None:
    """Check that the same terms give the same bits twice; they cancel, so that a change of order would show."""
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
            remedy="it is not repeatable, so it has no single order: fix threads, atomics or seeds first",
        )
