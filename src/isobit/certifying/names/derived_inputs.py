"""Inputs that torch computed from rows before the first launch: the certificate takes them as they are."""

from __future__ import annotations

from isobit.certifying.judging.configurations import Surveyed
from isobit.certifying.running.capture import Made


def derived_notes(surveyed: Surveyed) -> list[str]:
    """Return a note for every input that torch computed by combining elements of a tensor with rows."""
    one = surveyed.plans[0]
    if one.rows is None:
        return []
    watch, other = surveyed.pilots[one].watch, surveyed.pilots[surveyed.partners[one]].watch
    assert watch is not None
    assert other is not None
    mine = {made.key: made for made in watch.made.values()}
    shapes = {made.key: made.shape for made in other.made.values()}
    notes = []
    for key, views in surveyed.pilots[one].views.items():
        if key in mine and (found := combining(key, mine, shapes)):
            notes.append(
                f"{views[0].argument} was computed by torch ({found.operator}) from a tensor with rows; it is "
                "taken as an input of its own, and torch's order is not judged"
            )
    return notes


def combining(key: str, mine: dict[str, Made], shapes: dict[str, tuple[int, ...]]) -> Made | None:
    """Return the operator behind a tensor that combined elements of one whose shape follows the rows."""
    seen, work = set[str](), [key]
    while work:
        made = mine[work.pop()]
        if made.key in seen:
            continue
        seen.add(made.key)
        if not made.pointwise and any(shapes.get(p) != mine[p].shape for p in made.parents):
            return made
        work += made.parents
    return None
