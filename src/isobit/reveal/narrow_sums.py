"""Sizes of the sums around a pivot, for a target that cannot count all terms at once (bf16 counts to 256).

The sums that contain the pivot are nested, so a sample of the terms sorts the others coarsely: those that absorb more
of it are added to the pivot later. Inside a class that a sample cannot separate, only the class's own terms are
counted. That takes about two probes per term, where counting all terms in windows would take n / window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isobit.reveal.target import Session, as_range

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
