"""A strip per axis: layers across, operators down; colour is the distance in ulps, a ring the share of the effect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from isobit.auditing.records import ERROR, RANDOM, AxisReport, Guilty, Place
from isobit.auditing.report.sentence import MISSING, counted, percent, ulps_of
from isobit.report.markup import escape

# Where the guilty operators of an audit are: families of operators, the layers that have them, and their order.

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


LABEL, ROW, GRID, FOOT = 300, 26, 760, 34  # pixels: labels, height of a row, room for layers, below
WIDEST, NARROWEST = 30, 14  # pixels of a column
WORDS, OPERATOR, NAME = 44, 26, 16  # characters of a row's label, its operator, a column's label
SMALLEST, LARGEST = 2.5, 13.5  # pixels: radii of rings
SCALE = (
    f"at most {LARGEST_ULPS[0]}",
    *(f"{low + 1:,}–{high:,}" for low, high in pairwise(LARGEST_ULPS)),
    f"more than {LARGEST_ULPS[-1]:,}",
)


def draw_strip(axis: AxisReport) -> str:
    """Draw one axis as SVG, with a title on everything that is drawn and a label for the whole."""
    rows = families_of(axis)
    places = [one.place for one in axis.guilty] + [one.place for one in axis.unjudged]
    columns = layers_of(places)[:COLUMNS]
    if not axis.guilty or not columns:
        return ""
    pitch = max(NARROWEST, min(WIDEST, GRID / len(columns)))
    at = {layer: LABEL + (index + 0.5) * pitch for index, layer in enumerate(columns)}
    named = [layer for layer in columns if not split_layer(layer)]
    top = 24 + (6 * max((min(len(layer), NAME) for layer in named), default=0))
    parts, rings = list[str](), list[str]()
    for index, (family, cells) in enumerate(rows.items()):
        y = top + (index + 0.5) * ROW
        parts.append(_label(y, family, cells))
        x1 = LABEL + len(columns) * pitch
        parts.append(f'<line x1="{LABEL}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}" class="rule"/>')
        for layer, cell in cells.items():
            if layer in at:
                parts.append(_cell(at[layer], y, 0.66 * min(pitch, ROW), family, layer, cell))
                rings.append(_ring(at[layer], y, cell))
    bottom = top + len(rows) * ROW
    if axis.unjudged:
        parts += _open_row(axis, at, bottom + ROW / 2, 1000 if pitch >= 20 else 100)
        bottom += ROW
    parts += _heads(columns, at, pitch, top, bottom)
    height = bottom + FOOT
    width = LABEL + max(len(columns) * pitch, 120) + 40
    return (
        f'<svg class="strip" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" '
        f'role="img" aria-label="{escape(describe_strip(axis))}">{"".join(parts + rings)}</svg>'
    )


def describe_strip(axis: AxisReport) -> str:
    """Describe in words what a strip shows."""
    families = {one.place.family for one in axis.guilty}
    layers = layers_of([one.place for one in axis.guilty], gaps=True)
    text = (
        f"Axis {axis.axis}: {counted(len(axis.guilty), 'guilty operator')} of {len(families):,} "
        f"kinds in {counted(len(layers), 'layer')}"
    )
    if axis.guilty and axis.guilty[0].share is not None:
        first = axis.guilty[0]
        text += (
            f"; the largest share of the effect, {percent(first.share)}, is that of {first.place}"
        )
        text += f", {ulps_of(first)} ulp"
    return f"{text}. The table below has the same figures."


def _label(y: float, family: str, cells: dict[str, Cell]) -> str:
    """Write the name of a row: the operator, then the end of the module's path."""
    operator, _, path = family.partition(" in ")
    short = operator.removeprefix("aten::")
    short = short if len(short) <= OPERATOR else f"{short[: OPERATOR - 1]}…"
    room = WORDS - len(short) - 3
    path = re.sub(r"^.*?\*\.", "", path)
    path = path if len(path) <= room else f"…{path[-max(room, 8) :]}"
    guilty = sum(len(cell.guilty) for cell in cells.values())
    title = f"{family}: {guilty:,} guilty, {percent(whole_share(cells))} of the effect"
    return (
        f'<text x="{LABEL - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(short)} '
        f'<tspan class="soft">{escape(path)}</tspan><title>{escape(title)}</title></text>'
    )


def _cell(x: float, y: float, size: float, family: str, layer: str, cell: Cell) -> str:
    corner = f'x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size:.1f}" height="{size:.1f}"'
    if not cell.guilty:
        title = escape(f"{family}, {layer}: {counted(cell.unjudged, 'call')} without a verdict")
        return f'<rect {corner} rx="3" class="open"><title>{title}</title></rect>'
    worst = max(cell.guilty, key=lambda one: (one.ulps is None, one.ulps or 0))
    words = f"{family}, {layer}: {ulps_of(worst)} ulp, {percent(cell.share)} of the effect"
    kinds = ", ".join(sorted({one.kind for one in cell.guilty}))
    words += f", {kinds}" + (f", {len(cell.guilty)} calls" if len(cell.guilty) > 1 else "")
    return f'<rect {corner} rx="3" class="{cell.tone}{cell.frame}"><title>{escape(words)}</title></rect>'


def _open_row(axis: AxisReport, at: dict[str, float], y: float, room: int) -> list[str]:
    """Write how many calls of each layer have no verdict."""
    counts: dict[str, int] = {}
    for one in axis.unjudged:
        counts[one.place.layer] = counts.get(one.place.layer, 0) + 1
    words = f"{counted(len(axis.unjudged), 'call')} without a verdict"
    parts = [
        f'<text x="{LABEL - 10}" y="{y + 4:.1f}" text-anchor="end" class="soft">without a verdict'
        f"<title>{escape(words)}</title></text>"
    ]
    for layer, count in counts.items():
        if layer in at:
            title = escape(f"{layer}: {counted(count, 'call')} without a verdict")
            shown = f"{count}" if count < room else "∙∙"
            parts.append(
                f'<text x="{at[layer]:.1f}" y="{y + 3:.1f}" text-anchor="middle" class="tiny">{shown}'
                f"<title>{title}</title></text>"
            )
    return parts


def _ring(x: float, y: float, cell: Cell) -> str:
    share = min(cell.share, 1.0) if math.isfinite(cell.share) else 1.0
    if not share:
        return ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius_of(share):.1f}" class="ring"/>'


def radius_of(share: float) -> float:
    """Return the radius of a ring, which grows with the square root of the share."""
    return SMALLEST + (LARGEST - SMALLEST) * math.sqrt(share)


def _heads(
    columns: list[str], at: dict[str, float], pitch: float, top: float, bottom: float
) -> list[str]:
    """Write numbers above the columns, and below them the path that they share."""
    parts = []
    groups: dict[str, list[str]] = {}
    every = 1 if pitch >= 18 else 5
    for layer in columns:
        split, x = split_layer(layer), at[layer]
        if split is None:
            name = layer if len(layer) <= NAME else f"{layer[: NAME - 1]}…"
            turn = f'transform="rotate(-90 {x:.1f} {top - 8:.1f})"'
            parts.append(
                f'<text x="{x:.1f}" y="{top - 4:.1f}" {turn} class="soft">{escape(name)}'
                f"<title>{escape(layer)}</title></text>"
            )
            continue
        groups.setdefault(split[0], []).append(layer)
        if split[1] % every == 0:
            parts.append(
                f'<text x="{x:.1f}" y="{top - 8:.1f}" text-anchor="middle" class="soft">{split[1]}</text>'
            )
    for prefix, layers in groups.items():
        left, right = at[layers[0]] - pitch / 2 + 2, at[layers[-1]] + pitch / 2 - 2
        y = bottom + 6
        parts.append(f'<path d="M{left:.1f} {y} v5 H{right:.1f} v-5" class="rule"/>')
        name = prefix.rstrip(".") or "layers"
        room = max(6, int((right - left) / 6.5))
        name = name if len(name) <= room else f"…{name[-room:]}"
        parts.append(
            f'<text x="{(left + right) / 2:.1f}" y="{y + 20:.1f}" text-anchor="middle" class="soft">'
            f"{escape(name)}<title>{escape(prefix)}</title></text>"
        )
    return parts


def legend() -> str:
    """Return the legend of every strip as HTML."""
    colours = [(f"u{level}", words) for level, words in enumerate(SCALE)] + [("nan", "NaN")]
    frames = (("u0 wrong", "error"), ("u0 chance", "random"), ("open", "without a verdict"))
    rings = "".join(
        f'<span><svg class="strip" width="30" height="30" aria-hidden="true"><circle cx="15" cy="15" '
        f'r="{radius_of(share):.1f}" class="ring"/></svg> {percent(share)}</span>'
        for share in (0.01, 0.1, 1.0)
    )
    return (
        f'<p class="legend"><b>Units in the last place:</b> {_swatches(colours)}</p>'
        f'<p class="legend"><b>Share of the effect:</b> {rings} {_swatches(frames)} '
        "<span>nothing drawn: not guilty</span></p>"
    )


def _swatches(named: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f'<span><svg class="strip" width="16" height="16" aria-hidden="true"><rect x="1" y="1" width="14" '
        f'height="14" rx="3" class="{kind}"/></svg> {words}</span>'
        for kind, words in named
    )
