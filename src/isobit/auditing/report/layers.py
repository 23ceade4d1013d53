"""Where the guilty operators of an audit are: families of operators, the layers that have them, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from isobit.auditing.records import ERROR, RANDOM, AxisReport, Guilty, Place
from isobit.auditing.report.figures import MISSING, percent, ulps_of

ROWS, COLUMNS = 40, 160  # families and layers that are drawn; the others are in the tables
LARGEST_ULPS = (1, 3, 15, 255, 65_535)  # the upper end of each colour but the last


@dataclass
class Cell:
    """The operators of one family in one layer."""

    guilty: list[Guilty] = field(default_factory=list)
    unjudged: int = 0

    @property
    def share(self) -> float:
        return sum(abs(one.share or 0.0) for one in self.guilty)

    @property
    def tone(self) -> str:
        if any(one.ulps is None for one in self.guilty):
            return "nan"
        return f"u{level_of(max(one.ulps or 0 for one in self.guilty))}"

    @property
    def frame(self) -> str:
        kinds = {one.kind for one in self.guilty}
        return " wrong" if ERROR in kinds else " chance" if RANDOM in kinds else ""


def level_of(ulps: int) -> int:
    """Return the place of a distance on the scale of colours, which is logarithmic."""
    return sum(ulps > limit for limit in LARGEST_ULPS)


def families_of(axis: AxisReport) -> dict[str, dict[str, Cell]]:
    """Return the cells of each family by layer: those with the largest shares, in the order of the calls."""
    found: dict[str, dict[str, Cell]] = {}
    for one in axis.guilty:
        cells = found.setdefault(one.place.family, {})
        cells.setdefault(one.place.layer, Cell()).guilty.append(one)
    for other in axis.unjudged:
        if other.place.family in found:
            found[other.place.family].setdefault(other.place.layer, Cell()).unjudged += 1
    order = _order(axis)
    largest = sorted(found, key=lambda name: (-whole_share(found[name]), order[name]))[:ROWS]
    return {name: found[name] for name in sorted(largest, key=lambda name: order[name])}


def _order(axis: AxisReport) -> dict[str, tuple[int, int, int, str]]:
    """Return a key per family: the first call of its kind of layer, then how late in a layer it is called."""
    places = [one.place for one in axis.guilty]
    starts: dict[str, int] = {}  # of each layer, and of all layers with the same path
    for place in places:
        for name in (place.layer, f"{_path(place)}*"):
            starts[name] = min(starts.get(name, place.call), place.call)
    first: dict[str, int] = {}
    late: dict[str, int] = {}
    path: dict[str, int] = {}
    for place in places:
        family = place.family
        first[family] = min(first.get(family, place.call), place.call)
        late[family] = max(late.get(family, 0), place.call - starts[place.layer])
        path[family] = starts[f"{_path(place)}*"]
    return {name: (path[name], late[name], first[name], name) for name in first}


def _path(place: Place) -> str:
    return (split_layer(place.layer) or (place.layer, 0))[0]


def in_words(axis: AxisReport) -> list[tuple[str, str, str, str]]:
    """Return a strip's rows as text: operator, layers, ulps and share; all families, also those not drawn."""
    found: dict[str, list[Guilty]] = {}
    for one in axis.guilty:
        found.setdefault(one.place.family, []).append(one)
    rows = []
    for family, guilty in found.items():
        layers = layers_of([one.place for one in guilty], gaps=True)
        worst = max(guilty, key=lambda one: (one.ulps is None, one.ulps or 0))
        measured = [abs(one.share) for one in guilty if one.share is not None]
        share = percent(sum(measured)) if measured else MISSING
        rows.append((family, _listed(layers), ulps_of(worst), share))
    return rows


def _listed(layers: list[str]) -> str:
    """Join layers; numbers under the same path are written after it once."""
    groups: dict[str, list[str]] = {}
    for layer in layers:
        prefix, number = split_layer(layer) or (layer, None)
        groups.setdefault(prefix, []).extend([] if number is None else [str(number)])
    return "; ".join(f"{name} {', '.join(numbers)}".strip() for name, numbers in groups.items())


def layers_of(places: Iterable[Place], gaps: bool = False) -> list[str]:
    """Return layers in the order of their first calls; numbered ones by number, all of them without `gaps`."""
    first: dict[str, int] = {}
    numbers: dict[str, set[int]] = {}
    for place in places:
        prefix, number = split_layer(place.layer) or (place.layer, None)
        first[prefix] = min(first.get(prefix, place.call), place.call)
        if number is not None:
            numbers.setdefault(prefix, set()).add(number)
    layers = []
    for prefix in sorted(first, key=lambda name: (first[name], name)):
        if prefix not in numbers:
            layers.append(prefix)
            continue
        present = numbers[prefix]
        filled = not gaps and max(present) < COLUMNS
        whole = range(max(present) + 1) if filled else sorted(present)
        layers += [f"{prefix}{number}" for number in whole]
    return layers


def split_layer(layer: str) -> tuple[str, int] | None:
    """Split a layer such as `model.layers.12`; None without a number, or with one that no model has."""
    found = re.fullmatch(r"((?:.*\.)?)(0|[1-9][0-9]{0,8})", layer, re.DOTALL)
    return (found.group(1), int(found.group(2))) if found else None


def whole_share(cells: dict[str, Cell]) -> float:
    """Return the share of a family."""
    return sum(cell.share for cell in cells.values())
