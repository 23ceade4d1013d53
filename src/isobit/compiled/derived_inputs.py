"""Inputs that torch computed from rows before the first launch: the certificate takes them as they are."""

from __future__ import annotations

from isobit.compiled.capture import Made
from isobit.compiled.configurations import Surveyed
from isobit.errors import UnsupportedError


def derived_notes(surveyed: Surveyed) -> list[str]:
    """Return a note for every input without rows that torch computed from a tensor whose size follows the rows."""
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
        try:
            has_rows = surveyed.axis(one, key, 0) is not None
        except UnsupportedError:
            has_rows = True
        if has_rows or key not in mine:
            continue
        if source := row_ancestor(key, mine, shapes):
            notes.append(
                f"{views[0].argument} is computed by torch ({mine[key].operator}) from a tensor with rows "
                f"({source.operator}); it is taken as an input of its own, and torch's order is not judged"
            )
    return notes


def row_ancestor(
    key: str, mine: dict[str, Made], shapes: dict[str, tuple[int, ...]]
) -> Made | None:
    """Return an ancestor whose shape follows the number of rows."""
    seen, work = {key}, list(mine[key].parents)
    while work:
        parent = work.pop()
        if parent in seen:
            continue
        seen.add(parent)
        if shapes.get(parent) != mine[parent].shape:
            return mine[parent]
        work += mine[parent].parents
    return None
