"""The arithmetic of a revealed order: what it consists of, and the probes that find it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from blake3 import blake3

from isobit.errors import RevealError
from isobit.order.addition import Branch, Step, steps_of
from isobit.reveal.target import Session, Terms

# The arithmetic of a revealed order: widths of its additions, how products and subnormal numbers enter.
#
# Equal orders with equal arithmetic give equal bits for all finite inputs, if the kernel does not branch on them.

WIDTHS = (8, 11, 24, 53)  # significand bits of bf16, fp16, fp32, fp64
NAMES = {8: "bf16", 11: "fp16", 24: "fp32", 53: "fp64"}


@dataclass(frozen=True)
class Arithmetic:
    """What the additions of one tree do.

    The last addition cannot be separated from what is done to its result.
    """

    products: str  # "none", "exact" (the dtype's products fit the accumulator), "fused", "rounded" or "mixed"
    rounded: frozenset[int]  # the terms whose product is rounded before it is added
    widths: tuple[int, ...]  # significand bits of each addition's result, in the order of steps_of
    terms_cut_to: int | None  # significand bits of a term as it enters, if fewer than written
    cut_how: str  # "", or how that is done: "truncated" or "rounded", with ", factors too" for both sides of a product
    keeps_subnormal_terms: bool | None  # None: not observed
    keeps_subnormal_sums: bool | None
    keeps_negative_zero: bool  # whether a sum of -0.0 alone is -0.0: False if it starts from +0.0
    # Roundings of an addition whose operands are wider than its result. "": an addition of two rounds to its widest
    # operand's format first, a fused one rounds once. "through fp64": all go through fp64. "at once": all round once.
    passing: str = ""

    def __str__(self) -> str:
        """Describe the arithmetic in one line."""
        count = Counter(self.widths[:-1] or self.widths)
        (usual, _), *others = count.most_common()
        parts = [f"{NAMES[usual]} sums"]
        parts += [f"{number} additions rounded to {NAMES[width]}" for width, number in others]
        if self.products != "none":
            words = {
                "exact": "exact products",
                "fused": "products fused into the addition",
                "rounded": "products rounded first",
                "mixed": f"{len(self.rounded)} products rounded first, the others fused",
            }
            parts.append(words[self.products])
        if self.terms_cut_to is not None:
            parts.append(f"terms cut to {self.terms_cut_to} bits, {self.cut_how}")
        kept = {
            (True, True): "subnormals kept",
            (False, False): "subnormals are zero",
            (True, False): "subnormal sums are zero",
            (False, True): "subnormal terms are zero",
            (None, None): "subnormals not observed",
        }
        parts.append(kept[self.keeps_subnormal_terms, self.keeps_subnormal_sums])
        if self.keeps_negative_zero:
            parts.append("-0 kept")
        if self.passing:
            parts.append(f"rounded {self.passing}")
        return ", ".join(parts)

    @property
    def digest(self) -> bytes:
        """The BLAKE3 digest of all fields."""
        cut = self.terms_cut_to, self.cut_how
        text = repr((self.products, sorted(self.rounded), self.widths, *cut))
        subnormals = self.keeps_subnormal_terms, self.keeps_subnormal_sums
        text += repr((*subnormals, self.keeps_negative_zero)) + self.passing
        return blake3(text.encode()).digest()


# Probe what each addition does, once the order is known: widths, fused or rounded products, subnormal numbers.

BELOW_OVERFLOW = 32  # a sum of so many 2^120 is finite, and a bf16 number
FUSED_BATCH = 1024  # an fp32 sum holds so many residues of 2^-12 next to one of 2^-24


@dataclass(frozen=True)
class _Place:
    """Where one addition is tested: a term of each of two operands, and a term that is added to the result."""

    step: int
    a: int
    b: int
    c: int


def find_arithmetic(session: Session, branch: Branch) -> Arithmetic:
    """Probe every addition but the last."""
    steps = steps_of(branch)
    widths = _find_widths(session, steps)
    cut = _find_cut(session, steps)
    products, rounded = _find_fusion(session, steps)
    terms, sums = _find_subnormals(session, steps)
    (zero,) = session.ask([Terms((), (), -0.0, range(session.target.n))], "arithmetic")
    return Arithmetic(
        products, rounded, widths, cut, "", terms, sums, zero == 0 and math.copysign(1, zero) < 0
    )


def _find_subnormals(session: Session, steps: list[Step]) -> tuple[bool | None, bool | None]:
    """Return whether subnormal terms are kept, and whether subnormal sums are."""
    small = session.target.scale.subnormal
    if not small:
        return None, None
    groups = _leaf_places(session, steps)
    terms = [Terms(tuple(chain.from_iterable(g)), (small, 2 * small) * len(g)) for g in groups]
    sums = [Terms(tuple(chain.from_iterable(g)), (3 * small, -2 * small) * len(g)) for g in groups]
    found = session.ask([*terms, *sums], "arithmetic")
    with_terms = [value / (small * len(g)) for value, g in zip(found, groups, strict=False)]
    left_over = [
        value / (small * len(g)) for value, g in zip(found[len(groups) :], groups, strict=True)
    ]
    for what, seen, flushed, kept in (
        ("terms", with_terms, 2.0, 3.0),
        ("sums", left_over, 0.0, 1.0),
    ):
        if set(seen) not in ({flushed}, {kept}):
            raise RevealError(
                expected=f"subnormal {what} that are kept everywhere, or nowhere",
                received=f"both, from {session.target.name}",
                remedy="parts of the sum run in different modes; pass arithmetic=False for the order alone",
            )
    return with_terms[0] == 3.0, left_over[0] == 1.0


def _antichains(steps: list[Step], wanted: Callable[[int], bool]) -> list[list[tuple[int, int]]]:
    """Group (child, parent) pairs so that no parent is above another: one probe then tests a group.

    Additions of one height are such a group; two children of one parent are kept apart.
    """
    heights: list[int] = []
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, step in enumerate(steps):
        heights.append(1 + max(0 if child < 0 else heights[child] for child in step))
        for place, child in enumerate(step):
            if wanted(child):
                groups.setdefault((heights[at], place), []).append((child, at))
    return list(groups.values())


def _some_terms(steps: list[Step]) -> list[int]:
    """Return a term under each step."""
    terms: list[int] = []
    for step in steps:
        terms.append(~step[0] if step[0] < 0 else terms[step[0]])
    return terms


def _find_widths(session: Session, steps: list[Step]) -> tuple[int, ...]:
    """Find widths: with 1 + 2^-q at an addition and -1 at the next, 2^-q is left if there are more than q bits."""
    some = _some_terms(steps)

    def term(child: int) -> int:
        return ~child if child < 0 else some[child]

    groups = []
    for group in _antichains(steps, lambda child: child >= 0):
        places = []
        for child, parent in group:
            other = next(c for c in steps[parent] if c != child)
            places.append(_Place(child, term(steps[child][0]), term(steps[child][1]), term(other)))
        groups.append(places)
    widths = [0] * len(steps)
    survived = {place.step: WIDTHS[0] for places in groups for place in places}
    for narrow, wide in pairwise(WIDTHS):
        groups = [
            kept for places in groups if (kept := [p for p in places if survived[p.step] == narrow])
        ]
        for step in _surviving(session, groups, 2.0**-narrow):
            survived[step] = wide
    widest = [
        kept for places in groups if (kept := [p for p in places if survived[p.step] == WIDTHS[-1]])
    ]
    if _surviving(session, widest, 2.0 ** -WIDTHS[-1]):
        raise RevealError(
            expected="sums kept in at most fp64",
            received=f"more than {WIDTHS[-1]} bits, from {session.target.name}",
            remedy="it accumulates wider, or compensates; pass arithmetic=False for the order alone",
        )
    for step, width in survived.items():
        widths[step] = width
    usual = Counter(survived.values()).most_common(1)
    widths[-1] = usual[0][0] if usual else 24
    return tuple(widths)


def _surviving(session: Session, groups: list[list[_Place]], small: float) -> set[int]:
    """Return the additions after which `small` is left; a group is one probe unless its members disagree."""
    found: set[int] = set()
    while groups:
        batch = [
            Terms(tuple(t for p in g for t in (p.a, p.b, p.c)), (1.0, small, -1.0) * len(g))
            for g in groups
        ]
        halves: list[list[_Place]] = []
        for group, value in zip(groups, session.ask(batch, "arithmetic"), strict=True):
            if value == small * len(group):
                found |= {place.step for place in group}
            elif len(group) > 1 and value != 0:
                halves += [group[: len(group) // 2], group[len(group) // 2 :]]
        groups = halves
    return found


def _leaf_places(session: Session, steps: list[Step], most: int = 0) -> list[list[tuple[int, int]]]:
    """Return (term, a term of what it is added to), in groups of at most `most` that one probe can test."""
    some = _some_terms(steps)
    # A narrow accumulator must hold the sum of what a group leaves.
    most = most or (
        FUSED_BATCH if session.window >= session.target.n else max(session.window // 4, 1)
    )
    groups = []
    for group in _antichains(steps, lambda child: child < 0):
        pairs = []
        for child, parent in group:
            other = next(c for c in steps[parent] if c != child)
            pairs.append((~child, ~other if other < 0 else some[other]))
        groups += [pairs[at : at + most] for at in range(0, len(pairs), most)]
    return groups


def _find_cut(session: Session, steps: list[Step]) -> int | None:
    """Find the bits of a term as it enters: its last place must be left when the rest cancels."""
    written = width = session.target.scale.bits
    groups = _leaf_places(session, steps)
    while True:
        last = 2.0 ** (1 - width)
        batch = [
            Terms(tuple(chain.from_iterable(pairs)), (1.0 + last, -1.0) * len(pairs))
            for pairs in groups
        ]
        found = session.ask(batch, "arithmetic")
        kept = [value == last * len(pairs) for pairs, value in zip(groups, found, strict=True)]
        if all(kept):
            return None if width == written else width
        if any(kept) or any(found) or width == 2:
            raise RevealError(
                expected="terms that all enter with the same number of bits",
                received=f"some cut below {width} bits and some not, from {session.target.name}",
                remedy="it is not one arithmetic; pass arithmetic=False for the order alone",
            )
        width -= 1


def _find_fusion(session: Session, steps: list[Step]) -> tuple[str, frozenset[int]]:
    """Find which products are rounded before they are added.

    With u = 1 + 2^-12, u*u - u is 2^-12 + 2^-24 where the product enters unrounded, else 2^-12. Products of bf16
    numbers fit fp32 unless they overflow: 2^128, minus a number just below it, is finite only where the product is not
    rounded. Products of fp16 numbers do not overflow fp32 either.
    """
    target = session.target
    if target.kind != "product":
        return "none", frozenset()
    if target.scale.bits == 24:
        u = 1.0 + 2.0**-12
        rounded = _rounded_products(session, steps, (u, -1.0), u, 2.0**-12 + 2.0**-24, 2.0**-12)
    elif target.scale.largest > 100:
        rounded = _rounded_products(
            session, steps, (2.0**64, 2.0**56 - 2.0**64), 2.0**64, 2.0**120, math.inf
        )
        return ("rounded" if len(rounded) == target.n else "exact"), rounded
    else:
        return "exact", frozenset()
    if len(rounded) == target.n:
        return "rounded", rounded
    return ("fused" if _only_first(steps, rounded) else "mixed"), rounded


def _rounded_products(
    session: Session,
    steps: list[Step],
    pair: tuple[float, float],
    factor: float,
    kept: float,
    lost: float,
) -> frozenset[int]:
    """Return the terms at which a pair leaves `lost` instead of `kept`; groups are halved where they disagree."""
    groups, rounded = (
        _leaf_places(session, steps, BELOW_OVERFLOW if math.isinf(lost) else 0),
        set[int](),
    )
    while groups:
        batch = [Terms(tuple(chain.from_iterable(g)), pair * len(g), factor=factor) for g in groups]
        halves: list[list[tuple[int, int]]] = []
        for group, value in zip(groups, session.ask(batch, "arithmetic"), strict=True):
            if value == lost * len(group) and (len(group) == 1 or math.isfinite(lost)):
                rounded |= {term for term, _ in group}
            elif value != kept * len(group) and len(group) > 1:
                halves += [group[: len(group) // 2], group[len(group) // 2 :]]
        groups = halves
    return frozenset(rounded)


def _only_first(steps: Sequence[Step], rounded: frozenset[int]) -> bool:
    """Return whether only the first product of each run is rounded: it is added to nothing."""
    return all(
        sum(~child in rounded for child in step if child < 0)
        <= (1 if all(c < 0 for c in step) else 0)
        for step in steps
    )
