"""The order of one sum as nested additions: its steps, its digest, and where two orders differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Union

from blake3 import blake3

# The index of a term, or the tuple of operands of one addition: two, or more in a fused addition.
Branch = Union[int, tuple["Branch", ...]]  # noqa: UP007 (a recursive alias, at run time)

# One addition of a flattened tree: its operands, where ~i is term i, and i is step i of the list.
Step = tuple[int, ...]


def chain(items: Iterable[Branch]) -> Branch:
    """Return the additions from left to right."""
    iterator = iter(items)
    branch = next(iterator)
    for item in iterator:
        branch = (branch, item)
    return branch


class _Same:
    """A branch compared by identity: nested tuples are too deep to be hashed."""

    def __init__(self, branch: Branch) -> None:
        self.branch = branch

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.branch is other.branch

    def __hash__(self) -> int:
        return id(self.branch)


def steps_of(branch: Branch) -> list[Step]:
    """Return every addition after those it needs."""
    return list(_steps_of(_Same(branch)))


@lru_cache(maxsize=8)  # revealing one sum asks several times
def _steps_of(same: _Same) -> list[Step]:
    """Find the additions. Trees are deep, so this does not recurse."""
    steps: list[Step] = []
    done: list[int] = []
    work: list[tuple[Branch, bool]] = [(same.branch, False)]
    while work:
        node, ready = work.pop()
        if isinstance(node, int):
            done.append(~node)
        elif ready:
            children = tuple(done[-len(node) :])
            del done[-len(node) :]
            done.append(len(steps))
            steps.append(children)
        else:
            work.append((node, True))
            work.extend((child, False) for child in reversed(node))
    return steps


def first_terms(steps: list[Step]) -> list[int]:
    """Return the smallest term under each step."""
    first: list[int] = []
    for step in steps:
        first.append(min(~child if child < 0 else first[child] for child in step))
    return first


def sizes_of(steps: list[Step]) -> list[int]:
    """Return the number of terms under each step."""
    sizes: list[int] = []
    for step in steps:
        sizes.append(sum(1 if child < 0 else sizes[child] for child in step))
    return sizes


def step_digests(steps: list[Step]) -> list[bytes]:
    """Return a digest per step of everything under it; the order of operands does not matter, as additions commute."""
    first, digests = first_terms(steps), list[bytes]()
    for step in steps:
        parts = sorted(
            (~child, blake3(b"leaf" + (~child).to_bytes(8, "little")).digest())
            if child < 0
            else (first[child], digests[child])
            for child in step
        )
        digests.append(blake3(b"node" + b"".join(part for _, part in parts)).digest())
    return digests


def digest(branch: Branch) -> str:
    """Return the BLAKE3 digest of an order."""
    if isinstance(branch, int):
        return blake3(b"leaf" + branch.to_bytes(8, "little")).hexdigest()[:32]
    return _digest(_Same(branch))


@lru_cache(maxsize=8)
def _digest(same: _Same) -> str:
    return step_digests(_steps_of(same))[-1].hex()[:32]


def depth_of(branch: Branch) -> int:
    """Return the largest number of additions that one term goes through."""
    heights: list[int] = []
    for step in steps_of(branch):
        heights.append(1 + max(0 if child < 0 else heights[child] for child in step))
    return heights[-1] if heights else 0


def write_formula(branch: Branch) -> str:
    """Return a formula such as `((0 + 3) + 2) + 1`, for a few terms."""
    texts: list[str] = []
    for step in steps_of(branch):
        texts.append(
            " + ".join(str(~child) if child < 0 else f"({texts[child]})" for child in step)
        )
    return texts[-1] if texts else str(branch)


def find_difference(left: Branch, right: Branch) -> tuple[str, str] | None:
    """Return the first addition of `left` that `right` does not make, and what `right` adds instead; None if equal."""
    ours, theirs = steps_of(left), steps_of(right)
    if not ours or not theirs:
        return None if left == right else (f"{left}", f"{right}")
    mine, others = step_digests(ours), step_digests(theirs)
    held = set(others)
    at = next((i for i, made in enumerate(mine) if made not in held), None)
    if at is None:
        return None
    # Both have everything under that addition, so its first operand is in `right` too, added to something else.
    operand, *rest = ours[at]
    key = operand if operand < 0 else mine[operand]
    there = next((s for s in theirs if any((c if c < 0 else others[c]) == key for c in s)), None)
    joined = [c for c in there or () if (c if c < 0 else others[c]) != key]
    name = _name(ours, operand)
    here = " + ".join([name, *(_name(ours, child) for child in rest)])
    return here, " + ".join([name, *(_name(theirs, child) for child in joined)])


def terms_of(steps: list[Step], child: int) -> Iterator[int]:
    """Yield the terms under a child of a step, in no particular order."""
    work = [child]
    while work:
        node = work.pop()
        if node < 0:
            yield ~node
        else:
            work.extend(steps[node])


def name_terms(terms: list[int]) -> str:
    """Describe terms, such as `terms 0–3` or `64 terms from 0, 16 apart`."""
    terms = sorted(terms)
    if len(terms) == 1:
        return f"term {terms[0]}"
    gaps = {b - a for a, b in pairwise(terms)}
    if gaps == {1}:
        return f"terms {terms[0]}–{terms[-1]}"
    if len(gaps) == 1:
        return f"{len(terms)} terms from {terms[0]}, {gaps.pop()} apart"
    return f"{len(terms)} terms from {terms[0]} to {terms[-1]}"


def _name(steps: list[Step], child: int) -> str:
    terms = list(terms_of(steps, child))
    return f"({name_terms(terms)})" if len(terms) > 1 else name_terms(terms)
