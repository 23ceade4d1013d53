"""Reveals the order in which a black box adds, by probing: two huge terms that cancel absorb what joins them first.

With +2^e at i, -2^e at j and 1 elsewhere, the sum is n minus the leaves of the smallest subtree that holds
both. One i against all j gives i's ancestors; recursion gives the tree. (The idea is FPRev's.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isobit.errors import UnsupportedError
from isobit.order.tree import Tree

# For one i: how many leaves the smallest subtree holding i and j has, for every j.
Probe = Callable[[int], Sequence[int]]


def reveal(probe: Probe, n: int) -> Tree:
    """The tree of a sum of n terms, from the sizes that `probe` reports."""
    return _build(list(range(n)), probe)


def _build(leaves: list[int], probe: Probe) -> Tree:
    """The subtree over `leaves`: siblings of the first leaf's path, nearest first."""
    first, *others = leaves
    if not others:
        return first
    sizes = probe(first)
    joined: dict[int, list[int]] = {}
    for other in others:
        joined.setdefault(int(sizes[other]), []).append(other)
    tree: Tree = first
    held = 1
    for size in sorted(joined):
        held += len(joined[size])
        if size != held:
            raise UnsupportedError(
                expected=f"a subtree of {held} terms around term {first}",
                received=f"a probe that counts {size}",
                remedy="the target is not a plain tree of additions of its terms",
            )
        tree = (tree, _build(joined[size], probe))
    return tree
