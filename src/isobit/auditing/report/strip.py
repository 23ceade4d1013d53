"""A strip per axis: layers across, operators down; colour is the distance in ulps, a ring the share of the effect."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from isobit.auditing.records import AxisReport
from isobit.auditing.report.figures import counted, percent, ulps_of
from isobit.auditing.report.layers import (
    COLUMNS,
    LARGEST_ULPS,
    Cell,
    families_of,
    layers_of,
    split_layer,
    whole_share,
)
from isobit.report.markup import escape

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
