"""A picture of a run's log: the curves by step, and a mark at every finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap

from isobit.records import Provenance
from isobit.report.svg import Canvas

Point = tuple[int, float]
Mark = tuple[int, str, bool]  # step, words, whether it counts against the run
LEFT, WIDTH, HEIGHT, TOP, SPACE = 84, 760, 170, 94, 46
MOST_POINTS = 1500  # of a curve; of more, the lowest and highest of each bin are drawn
CLOSE = 24  # pixels between the labels of two marks
LINE = 125  # characters of a line about the picture


def draw_run(
    title: str,
    about: str,
    curves: Mapping[str, Sequence[Point]],
    marks: Sequence[Mark],
    origin: Provenance | None = None,
    wanted: Mapping[str, Sequence[Point]] | None = None,
) -> str:
    """Draw a panel per curve, with a vertical line at each finding and its number above the first panel.

    Args:
        title: The first line.
        about: The next lines: what was judged.
        curves: Points (step, value) by name; those that are not finite are drawn at the upper edge.
        marks: Findings, in the order of their numbers.
        origin: Where the picture comes from.
        wanted: What a curve should be, drawn beside it.
    """
    canvas = Canvas()
    canvas.text(LEFT, 22, title, "title")
    lines = wrap(about, LINE)
    for row, line in enumerate(lines):
        canvas.text(LEFT, 38 + 14 * row, line, "quiet")
    top = TOP + 14 * max(len(lines) - 1, 0)
    steps = [step for points in curves.values() for step, _ in points]
    low, high = min(steps, default=0), max(steps, default=1)
    span = max(high - low, 1)

    def across(step: int) -> float:
        return 8 + (step - low) / span * (WIDTH - 16)

    for row, (name, points) in enumerate(curves.items()):
        panel = draw_panel(name, points, marks, across, (wanted or {}).get(name, ()))
        canvas.place(panel, LEFT, top + row * (HEIGHT + SPACE))
    bottom = top + len(curves) * (HEIGHT + SPACE) - SPACE + 18
    canvas.text(LEFT + 8, bottom, f"step {low}", "quiet")
    canvas.text(LEFT + WIDTH - 8, bottom, str(high), "quiet", "end")
    for x, words, counts in labels_of([(across(step), counts) for step, _, counts in marks]):
        canvas.text(LEFT + x, top - 24, words, "" if counts else "quiet", "middle")
    for number, (step, words, counts) in enumerate(marks, 1):
        bottom += 18
        canvas.dot(LEFT + 8, bottom - 4, 4, "differs" if counts else "shared")
        for row, line in enumerate(lines_of(f"{number}. step {step}: {words}")):
            bottom += 15 if row else 0
            canvas.text(LEFT + (36 if row else 20), bottom, line)
    return canvas.document(LEFT + WIDTH + 24, bottom + 18, origin, is_page=True)


def labels_of(places: Sequence[tuple[float, bool]]) -> Iterator[tuple[float, str, bool]]:
    """Yield the labels of marks: place, numbers, whether one counts; those too close for two labels have one, `2–4`."""
    groups: list[list[int]] = []
    for at, (x, _) in enumerate(places):
        if groups and x - places[groups[-1][0]][0] < CLOSE:
            groups[-1].append(at)
        else:
            groups.append([at])
    for group in groups:
        words = str(group[0] + 1) + (f"–{group[-1] + 1}" if len(group) > 1 else "")
        yield places[group[0]][0], words, any(places[at][1] for at in group)


def lines_of(words: str) -> list[str]:
    """Return words as at most three lines that fit the width of the picture."""
    return wrap(words, 112, max_lines=3, placeholder=" …", break_on_hyphens=False) or [""]


def draw_panel(
    name: str,
    points: Sequence[Point],
    marks: Sequence[Mark],
    place: Callable[[int], float],
    wanted: Sequence[Point] = (),
) -> Canvas:
    """Draw one curve in its frame, with three lines of its scale, and behind it what it should be."""
    canvas = Canvas()
    beside = "; orange: the configuration's" if wanted else ""
    canvas.text(0, -8, f"{name} — {len(points):,} entries{beside}", "quiet")
    canvas.panel(0, 0, WIDTH, HEIGHT)
    values = sorted(value for _, value in (*points, *wanted) if math.isfinite(value))
    low, high = (values[0], values[-1]) if values else (0.0, 1.0)
    high = high if high > low else low + (abs(low) or 1.0)

    def height(value: float) -> float:
        if not math.isfinite(value):
            return 6.0
        return HEIGHT - 14 - (value - low) / (high - low) * (HEIGHT - 28)

    for value in (low, (low + high) / 2, high):
        canvas.line(0, height(value), WIDTH, height(value), "axis hair")
        canvas.text(-8, height(value) + 4, f"{value:.4g}", "quiet", "end")
    for step, words, counts in marks:
        x = place(step)
        canvas.line(x, 0, x, HEIGHT, "differs hair" if counts else "shared hair", words)
    for (x0, y0), (x1, y1) in pairwise((place(s), height(v)) for s, v in thinned(wanted)):
        canvas.line(x0, y0, x1, y1, "differs hair")
    drawn = [(place(step), height(value)) for step, value in thinned(points)]
    for (x0, y0), (x1, y1) in pairwise(drawn):
        canvas.line(x0, y0, x1, y1, "same hair")
    if len(drawn) == 1:
        canvas.dot(*drawn[0], 2, "same")
    for step, value in points:
        if not math.isfinite(value):
            canvas.dot(place(step), 6, 3, "differs", f"step {step}: {value}")
    return canvas


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points; the lowest and highest of each bin are kept, so that no spike is lost."""
    shown = [point for point in points if math.isfinite(point[1])]
    if len(shown) <= MOST_POINTS:
        return shown
    size = math.ceil(len(shown) / (MOST_POINTS // 2))
    out: list[Point] = []
    for start in range(0, len(shown), size):
        bin_ = shown[start : start + size]
        ends = {min(bin_, key=lambda p: p[1]), max(bin_, key=lambda p: p[1])}
        out += sorted(ends)
    return out
