"""Find the tree of a sum whose terms may be negative: two huge terms that cancel absorb what is added before.

With +2^e at i, -2^e at j and units elsewhere, the sum lacks the units of the smallest subtree with both. One pivot
against all others gives the sizes of its ancestors, and so the subtrees next to its path; each is a smaller problem.
(The idea is from FPRev.) All problems of one depth are probed in one batch. A random pivot needs O(n log n) probes for
any tree; the first term needs fewer for most kernels, so it is tried first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from isobit.errors import RevealError
from isobit.order.addition import Branch, Step, sizes_of, steps_of
from isobit.reveal.target import Session, as_range

# Sizes of the sums around a pivot, for a target that cannot count all terms at once (bf16 counts to
# 256).
#
# The sums that contain the pivot are nested, so a sample of the terms sorts the others coarsely:
# those that absorb more of it are added to the pivot later. Inside a class that a sample cannot
# separate, only the class's own terms are counted. That takes about two probes per term, where
# counting all terms in windows would take n / window.

FEW = 32  # up to so many terms are marked one by one, and probes share a call


@dataclass(frozen=True)
class _Class:
    """Terms whose sums with the pivot are not yet separated; each sum has `below` terms outside the class."""

    group: int
    pivot: int
    members: list[int]
    below: int

    def sample(self, room: int) -> Sequence[int]:
        """Return members that the target can count at once: all of them, or some spread evenly."""
        chosen = self.members[:: -(-len(self.members) // room)]
        return chosen if len(chosen) <= FEW else as_range(chosen) or tuple(chosen)


def find_sizes(
    session: Session, pivots: list[int], others: list[list[int]], stage: str
) -> list[dict[int, int]]:
    """Return for each pivot the size of its smallest sum with each other term, within the group."""
    sizes: list[dict[int, int]] = [{} for _ in pivots]
    classes = [
        _Class(at, pivot, rest, 1)
        for at, (pivot, rest) in enumerate(zip(pivots, others, strict=True))
        if rest
    ]
    while classes:
        samples = [c.sample(session.window) for c in classes]
        asked = [
            ((c.pivot, j), counted)
            for c, counted in zip(classes, samples, strict=True)
            for j in c.members
        ]
        counts = iter(session.count_absorbed(asked, stage))
        following: list[_Class] = []
        for found, counted in zip(classes, samples, strict=True):
            absorbed = {j: next(counts) for j in found.members}
            if len(counted) == len(found.members):
                sizes[found.group].update({j: found.below + count for j, count in absorbed.items()})
            else:
                following += _separate(session, found, counted, absorbed, sizes[found.group], stage)
        classes = following
    return sizes


def _separate(
    session: Session,
    found: _Class,
    sample: Sequence[int],
    absorbed: dict[int, int],
    sizes: dict[int, int],
    stage: str,
) -> list[_Class]:
    """Return smaller classes; if the sample separates none, find the sizes themselves."""
    by_count: dict[int, list[int]] = {}
    for j, count in absorbed.items():
        by_count.setdefault(count, []).append(j)
    if len(by_count) > 1:
        below, classes = found.below, []
        for count in sorted(by_count):
            classes.append(_Class(found.group, found.pivot, by_count[count], below))
            below += len(by_count[count])
        return classes
    one = sample[0]
    if by_count.keys() == {len(sample)}:
        # Every sum absorbs `one`, so its own is inside them all; if that absorbs the whole class, all are the same.
        (size,) = session.sizes([(found.pivot, one)], found.members, stage)
        if size == len(found.members):
            sizes.update(dict.fromkeys(found.members, found.below + size))
            return []
    pairs = [(found.pivot, j) for j in found.members]
    counts = session.sizes(pairs, found.members, stage)
    sizes.update({j: found.below + count for j, count in zip(found.members, counts, strict=True)})
    return []


CHECKED_PAIRS = 32


class _Group:
    """Terms of one subtree, or of several equal ones of a fused addition, whose inside is not yet known."""

    def __init__(
        self,
        terms: list[int],
        pivot: int,
        size: int,
        into: list[Any],
        total: int,
        witness: int | None,
    ) -> None:
        self.terms, self.pivot = terms, pivot
        self.witness = witness  # a term outside the group, under the same addition
        self.size = size  # terms of one subtree
        self.into = into  # the addition whose operands these are
        self.total = total  # terms under that addition
        self.inside: Any = None


def find_tree(session: Session) -> Branch:
    """Find the tree; it is exact if the target is a tree of additions."""
    try:
        return _find_tree(session)
    except RevealError:
        if session.window >= session.target.n:
            raise
        session.thorough = True  # with few counts, fused additions do not look like a tree
        return _find_tree(session)


def _find_tree(session: Session) -> Branch:
    n = session.target.n
    if n == 1:
        return 0
    random = Random(n)
    whole: list[Any] = []
    root = _Group(list(range(n)), 0, n, whole, n, None)
    whole.append(root)
    wave, depth = [root], 0
    while wave:
        depth += 1
        others = [[j for j in group.terms if j != group.pivot] for group in wave]
        sizes = _find_sizes(session, wave, others, f"order, wave {depth}")
        wave = [
            following
            for group, rest, found in zip(wave, others, sizes, strict=True)
            for following in _split(session, group, rest, found, random)
        ]
    branch = _freeze(whole[0])
    scale = session.target.scale
    if scale.big / scale.unit < 2.0**54 and any(len(step) > 2 for step in steps_of(branch)):
        raise RevealError(
            expected="an accumulator in which the largest fp16 number absorbs the smallest",
            received=f"units that survive it, from {session.target.name}",
            remedy="it adds exactly, or in fp64: probe it with fp32 or bf16 terms",
        )
    _check_pairs(session, branch, random)
    return branch


def _find_sizes(
    session: Session, wave: list[_Group], others: list[list[int]], stage: str
) -> list[list[int]]:
    """Return for each group the sizes of the smallest sums of its pivot with each other term."""
    n = session.target.n
    if session.window >= n:
        counted = range(n)
        pairs = [
            ((group.pivot, j), counted)
            for group, rest in zip(wave, others, strict=True)
            for j in rest
        ]
        found = iter(session.count_absorbed(pairs, stage))
        return [[next(found) for _ in rest] for rest in others]
    if session.thorough:
        return [
            session.sizes([(group.pivot, j) for j in rest], range(n), stage)
            for group, rest in zip(wave, others, strict=True)
        ]
    known = find_sizes(session, [group.pivot for group in wave], others, stage)
    sizes = [[sizes[j] for j in rest] for sizes, rest in zip(known, others, strict=True)]
    _find_fused(session, wave, others, sizes)
    return sizes


def _split(
    session: Session, group: _Group, others: list[int], sizes: Sequence[int], random: Random
) -> list[_Group]:
    """Read the pivot's ancestors from the sizes; return the subtrees next to its path that are not yet known."""
    by_size: dict[int, list[int]] = {}
    for other, size in zip(others, sizes, strict=True):
        by_size.setdefault(size, []).append(other)
    found: list[_Group] = []
    rest = [j for size in sorted(by_size) if size > group.size for j in by_size[size]]
    if rest:  # siblings in a fused addition: it absorbs either all its terms, or those of the two
        if set(by_size) - {s for s in by_size if s <= group.size} - {group.total, 2 * group.size}:
            raise _not_a_tree(group.pivot, group.size, max(by_size))
        found += _hang(group, rest, min(group.size, len(rest)), group.into, group.total, random)
    path: Any = group.pivot
    node: list[Any] = []
    held = base = 1
    last = group.pivot
    for size in sorted(s for s in by_size if s <= group.size):
        terms = by_size[size]
        count = len(terms)
        if size == held + count:  # an addition of two, or a fused one that absorbs all it adds
            node, base, each = [path], held, count
            path = node
        elif (
            node
            and count % (size - base) == 0
            and _survives(session, (group.pivot, terms[0]), last)
        ):
            each = size - base  # more operands of the same exact fused addition
        elif size > held and count % (size - held) == 0:  # a new one
            node, base, each = [path], held, size - held
            path = node
        else:
            raise _not_a_tree(group.pivot, held + count, size)
        held += count
        last = terms[0]
        found += _hang(group, terms, each, node, held, random)
    # A fused addition that absorbs all its terms shows its operands one by one: the first is not in `rest`.
    if held != (len(group.terms) - len(rest) if group.size == len(group.terms) else group.size):
        raise _not_a_tree(group.pivot, group.size, held)
    group.inside = path
    return found


def _survives(session: Session, pair: tuple[int, int], term: int) -> bool:
    """Return whether a term is left when the pair cancels: then all three are in one exact addition."""
    return session.count_absorbed([(pair, (term,))], "order") == [0]


def _find_fused(
    session: Session, wave: list[_Group], others: list[list[int]], sizes: list[list[int]]
) -> None:
    """Correct sizes that counted only a group's own terms: pairs that absorb the witness meet in the parent."""
    tested = [
        (
            at,
            group.witness,
            next((j for j, s in zip(rest, found, strict=True) if s == len(group.terms)), None),
        )
        for at, (group, rest, found) in enumerate(zip(wave, others, sizes, strict=True))
    ]
    asked = [((wave[at].pivot, j), (w,)) for at, w, j in tested if j is not None and w is not None]
    places = [at for at, w, j in tested if j is not None and w is not None]
    for at, absorbed in zip(places, session.count_absorbed(asked, "order"), strict=True):
        if absorbed:
            group = wave[at]
            sizes[at] = [group.total if size == len(group.terms) else size for size in sizes[at]]


def _hang(
    group: _Group, terms: list[int], each: int, into: list[Any], total: int, random: Random
) -> list[_Group]:
    """Add terms, in subtrees of `each`, to an addition; return the problem that they are, if any."""
    if each == 1:
        into.extend(terms)
        return []
    pivot = terms[0] if 2 * len(terms) <= len(group.terms) else random.choice(terms)
    into.append(_Group(terms, pivot, each, into, total, group.pivot))
    return [into[-1]]


def _freeze(node: Any) -> Branch:
    """Return the mutable nodes as nested tuples."""
    done: list[Branch] = []
    work: list[tuple[Any, int]] = [(node, -1)]
    while work:
        top, arity = work.pop()
        if arity >= 0:
            children = tuple(done[-arity:])
            del done[-arity:]
            done.append(children)
        elif isinstance(top, int):
            done.append(top)
        elif isinstance(top, _Group):
            work.append((top.inside, -1))
        else:
            work.append((top, len(top)))
            work.extend((child, -1) for child in reversed(top))
    return done[0]


def _check_pairs(session: Session, branch: Branch, random: Random) -> None:
    """Check random pairs against the tree."""
    n, steps = session.target.n, steps_of(branch)
    known = [(i, j) for i, j in (random.sample(range(n), 2) for _ in range(CHECKED_PAIRS))]
    parents = [0] * (n + len(steps))
    sizes = sizes_of(steps)
    for at, step in enumerate(steps):
        for child in step:
            parents[~child if child < 0 else n + child] = n + at
    for (i, j), absorbed in zip(known, session.sizes(known, range(n), "check"), strict=True):
        wanted = _predict(i, j, n, parents, sizes, steps)
        if absorbed not in wanted:
            raise _not_a_tree(i, wanted[0], absorbed)


def _predict(
    i: int, j: int, n: int, parents: list[int], sizes: list[int], steps: list[Step]
) -> tuple[int, ...]:
    """Return the size of the smallest subtree with both; of a fused addition also that of the two operands."""
    below = {i: 1}
    at, held = i, 1
    while at != n + len(steps) - 1:
        at, before = parents[at], held
        held = sizes[at - n]
        below[at] = before
    at, held = j, 1
    while at not in below:
        at, before = parents[at], held
        held = sizes[at - n]
        mine = before
    whole = sizes[at - n]
    return (whole, below[at] + mine) if len(steps[at - n]) > 2 else (whole,)


def _not_a_tree(term: int, expected: int, received: int) -> RevealError:
    return RevealError(
        expected=f"a subtree of {expected} terms around term {term}",
        received=f"probes that count {received}",
        remedy="the target is not a tree of additions of its terms, so it has no order to reveal",
    )
