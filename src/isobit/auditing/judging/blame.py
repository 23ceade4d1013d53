"""Rank guilty operators by their effect.

[Note: shares] The variant's results are put in the place of guilty operators' own, group after group, in the order of
execution. Each step changes the measured quantity by some vector d_k; together they change it by D = Σ d_k, from the
audited run to the run with all of them substituted. The share of group k is d_k·D / D·D, so that shares add up to 1.
A share may be negative: that operator's rounding happened to cancel others'.

Where D is not finite, or zero although bits changed (a NaN, another sign of zero), elements are counted instead: of
those whose bits the whole list changes, d_k are the ones that get their last bits, less the ones that lose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobit.auditing.judging.effects import Quantity, measure
from isobit.auditing.judging.findings import GuiltyCall
from isobit.auditing.records import Effect, Group, Guilty
from isobit.auditing.replay.call import shapes_of
from isobit.bits import as_integers

MANY = 40  # guilty operators above which they are measured by class
BY = ("one", "class", "layer", "bisect")


@dataclass
class Blame:
    """Shares and effects of groups of guilty calls."""

    grouped_by: str
    groups: list[Group]
    share: dict[int, float]
    effect: dict[int, Effect]
    forwards: int


def group(findings: Sequence[GuiltyCall], by: str) -> tuple[str, list[tuple[str, list[int]]]]:
    """Return groups of calls in the order of their first call."""
    if by == "auto":
        by = "one" if len(findings) <= MANY else "class"
    found: dict[str, list[int]] = {}
    for finding in sorted(findings, key=lambda f: f.place.call):
        place = finding.place
        name = {"class": place.family, "layer": place.layer}.get(by, f"{place} #{place.call}")
        found.setdefault(name, []).append(place.call)
    return by, list(found.items())


def rank(
    findings: Sequence[GuiltyCall],
    by: str,
    start: Quantity,
    last: Quantity,
    run: Callable[[set[int]], Quantity],
) -> Blame:
    """Substitute groups one after another and measure what each step changes.

    Args:
        findings: The guilty calls.
        by: "one", "class", "layer", "bisect", or "auto".
        start: The quantity of the audited run.
        last: The quantity with all of them substituted.
        run: Runs the audited run with these calls substituted, and returns the quantity.
    """
    by, groups = group(findings, by)
    points: dict[int, Quantity] = {0: start, len(groups): last}

    def at(count: int) -> Quantity:
        if count not in points:
            points[count] = run({call for _, calls in groups[:count] for call in calls})
        return points[count]

    steps = bisect(len(groups), at) if by == "bisect" else range(1, len(groups) + 1)
    steps = list(steps)
    vectors = as_vectors([at(count) for count in (0, *steps, len(groups))])
    whole = vectors[-1] - vectors[0]
    size = float(whole @ whole)
    blame = Blame(by, [], {}, {}, 0)
    before = 0
    for number, upto in enumerate(steps):
        effect = measure(at(before), at(upto))
        step = vectors[number + 1] - vectors[number]
        share = float(step @ whole) / size if size else 0.0
        changed = groups[upto - 1] if by == "bisect" else groups[before]
        skipped = groups[before : upto - 1] if by == "bisect" else []
        for _, calls in skipped:
            blame.share[calls[0]] = 0.0
        blame.groups.append(Group(changed[0], len(changed[1]), share, effect))
        if len(changed[1]) == 1:
            blame.share[changed[1][0]], blame.effect[changed[1][0]] = share, effect
        before = upto
    for _, calls in groups[before:]:
        blame.share[calls[0]] = 0.0
    blame.groups.sort(key=lambda g: -abs(g.share or 0.0))
    blame.forwards = len(points) - 2
    return blame


def bisect(count: int, at: Callable[[int], Quantity]) -> list[int]:
    """Return the steps that change the quantity; a range that changes nothing is not looked into."""
    found: list[int] = []

    def look(low: int, high: int) -> None:
        if same(at(low), at(high)):
            return
        if high - low == 1:
            found.append(high)
            return
        middle = (low + high) // 2
        look(low, middle)
        look(middle, high)

    if count:
        look(0, count)
    return found


def same(one: Quantity, other: Quantity) -> bool:
    """Return whether two quantities have the same bits."""
    return measure(one, other).differ == 0


def as_vectors(points: Sequence[Quantity]) -> list[Tensor]:
    """Return the quantities as vectors whose differences are the d_k of [Note: shares].

    Args:
        points: The quantity at every step, the first of the audited run and the last with all calls substituted.
    """
    numbers = [point.numbers for point in points]
    whole = numbers[-1] - numbers[0]
    finite = all(bool(torch.isfinite(one).all()) for one in numbers)
    if finite and 0 < float(whole @ whole) < float("inf"):
        return numbers
    first, *_, last = bits = [as_integers(one) for one in numbers]
    changed = first != last
    return [(changed & (one == last)).double() for one in bits]


def as_records(
    findings: Sequence[GuiltyCall],
    axis: str,
    blame: Blame | None,
    remedies: Sequence[str],
    why_no_order: str = "",
) -> tuple[Guilty, ...]:
    """Return the records of what was found, the largest share first, results that nothing reads last."""
    found = [
        Guilty(
            one.place,
            axis,
            one.comparison.elements,
            one.comparison.of,
            one.comparison.ulps,
            one.comparison.largest,
            one.kind,
            one.accuracy,
            one.comparison.first,
            (shapes_of(one.run), shapes_of(one.variant)),
            blame.share.get(one.place.call) if blame else None,
            blame.effect.get(one.place.call) if blame else None,
            why_no_order=why_no_order,
            remedy=remedy,
            unread=one.unread and not (blame and blame.share.get(one.place.call)),
        )
        for one, remedy in zip(findings, remedies, strict=True)
    ]
    return tuple(
        sorted(found, key=lambda one: (one.unread, -abs(one.share or 0.0), one.place.call))
    )
