"""The verdict on logs of training runs as a picture of the curves, and as a self-contained HTML report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from operator import itemgetter
from textwrap import wrap
from typing import Any

from isobit.foundation.records import Provenance
from isobit.report.markup import Canvas, escape
from isobit.report.pages import BASE_STYLE, write_document

# A picture of a run's log: the curves by step, and a mark at every finding.

Point = tuple[int, float]
Mark = tuple[
    int, str, bool, tuple[int, ...]
]  # step, words, whether it counts against the run, every step concerned
LEFT, WIDTH, HEIGHT, TOP, SPACE = 84, 760, 170, 94, 46
MOST_POINTS = 1500  # of a curve; of more, the lowest and highest of each bin are drawn
MOST_PLACES = 200  # lines of one finding
CLOSE = 24  # pixels between the labels of two marks
LINE = 125  # characters of a line about the picture


def draw_run(
    title: str,
    about: str,
    curves: Mapping[str, Sequence[Point]],
    marks: Sequence[Mark],
    origin: Provenance | None = None,
    wanted: Mapping[str, Sequence[Point]] | None = None,
    whose: str = "the configuration's",
) -> str:
    """Draw a panel per curve, with a vertical line at each finding and its number above the first panel.

    Args:
        title: The first line.
        about: The next lines: what was judged.
        curves: Points (step, value) by name, whose steps rise; those that are not finite are drawn at the upper edge.
        marks: Findings, in the order of their numbers.
        origin: Where the picture comes from.
        wanted: What a curve should be, drawn next to it in orange.
        whose: What the orange curve is, in words.
    """
    canvas = Canvas()
    canvas.text(LEFT, 22, title, "title")
    lines = wrap(about, LINE)
    for row, line in enumerate(lines):
        canvas.text(LEFT, 38 + 14 * row, line, "quiet")
    top = TOP + 14 * max(len(lines) - 1, 0)
    ends = [point[0] for points in curves.values() if points for point in (points[0], points[-1])]
    low, high = min(ends, default=0), max(ends, default=1)
    span = max(high - low, 1)

    def across(step: int) -> float:
        return 8 + (step - low) / span * (WIDTH - 16)

    for row, (name, points) in enumerate(curves.items()):
        panel = draw_panel(name, points, marks, across, (wanted or {}).get(name, ()), whose)
        canvas.place(panel, LEFT, top + row * (HEIGHT + SPACE))
    bottom = top + len(curves) * (HEIGHT + SPACE) - SPACE + 18
    canvas.text(LEFT - 8, bottom, "step", "quiet", "end")
    for tick in round_ticks(low, high, 8):
        canvas.text(LEFT + across(round(tick)), bottom, f"{tick:,.0f}", "quiet", "middle")
    for x, words, counts in labels_of([(across(step), counts) for step, _, counts, _ in marks]):
        canvas.text(LEFT + x, top - 24, words, "" if counts else "quiet", "middle")
    for number, (step, words, counts, _) in enumerate(marks, 1):
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
    whose: str = "",
) -> Canvas:
    """Draw one curve in its frame, with lines at round values, and behind it what it should be."""
    canvas = Canvas()
    legend = f"; orange: {whose}" if wanted else ""
    canvas.text(0, -8, f"{name} — {len(points):,} entries{legend}", "quiet")
    canvas.panel(0, 0, WIDTH, HEIGHT)
    shown, beside = thinned(points), thinned(wanted)
    values = [value for _, value in (*shown, *beside)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    high = high if high > low else low + (abs(low) or 1.0)

    def height(value: float) -> float:
        if not math.isfinite(value):
            return 6.0
        return HEIGHT - 14 - (value - low) / (high - low) * (HEIGHT - 28)

    for value in round_ticks(low, high, 5):
        canvas.line(0, height(value), WIDTH, height(value), "axis hair")
        canvas.text(-8, height(value) + 4, f"{value:.6g}", "quiet", "end")
    for _, words, counts, steps in marks:
        for x in map(place, steps[:MOST_PLACES]):
            canvas.line(x, 0, x, HEIGHT, "differs hair" if counts else "shared hair", words)
    for (x0, y0), (x1, y1) in pairwise((place(s), height(v)) for s, v in beside):
        canvas.line(x0, y0, x1, y1, "differs hair")
    drawn = [(place(step), height(value)) for step, value in shown]
    for (x0, y0), (x1, y1) in pairwise(drawn):
        canvas.line(x0, y0, x1, y1, "same hair")
    if len(drawn) == 1:
        canvas.dot(*drawn[0], 2, "same")
    last = -1
    for step, value in points:
        if not math.isfinite(value) and round(place(step)) > last:  # one in a pixel
            last = round(place(step))
            canvas.dot(place(step), 6, 3, "differs", f"step {step}: {value}")
    return canvas


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round values from low to high: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: The lowest value; finite.
        high: The highest value, above it.
        most: How many intervals there are at most.
    """
    rough = high / most - low / most  # the difference itself may overflow
    if not 0 < rough < math.inf:
        return [low]
    power = math.floor(math.log10(rough))
    gap = (
        next((each for each in (1, 2, 5) if each * 10.0**power >= rough * (1 - 1e-9)), 10)
        * 10.0**power
    )
    if not 0 < gap < math.inf or math.isinf(high / gap) or high / gap - low / gap > 2 * most:
        return [low, high]
    first = math.ceil(low / gap - 1e-9)
    count = math.floor(high / gap + 1e-9) - first + 1
    found = [float(f"{(first + at) * gap:.12g}") for at in range(count)]
    return found or [low, high]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS points; the lowest and highest of each bin are kept, so that no spike is lost."""
    count = sum(math.isfinite(value) for _, value in points)
    size = math.ceil(count / (MOST_POINTS // 2)) if count > MOST_POINTS else 1
    shown = (point for point in points if math.isfinite(point[1]))
    out: list[Point] = []
    while first := next(shown, None):
        low = high = first
        for point in islice(shown, size - 1):
            low, high = min(low, point, key=itemgetter(1)), max(high, point, key=itemgetter(1))
        out += sorted({low, high})
    return out


STYLE = """
th{white-space:nowrap}td{overflow-wrap:break-word}td:nth-child(n+5){min-width:14rem}code{white-space:nowrap}
.wide svg{max-width:100%;height:auto}
"""
BODY = """{sections}"""
TONES = {"error": "bad", "warning": "warn"}


@dataclass(frozen=True)
class Section:
    """One log, or one comparison of two.

    Attributes:
        title: What was judged.
        tone: "good", "warn" or "bad".
        verdict: The sentence of the verdict.
        findings: As dictionaries, in the order of their numbers.
        not_judged: Rules that were not judged, with the reason.
        picture: SVG.
    """

    title: str
    tone: str
    verdict: str
    findings: Sequence[Mapping[str, Any]]
    not_judged: Mapping[str, str]
    picture: str


def write_run_page(
    title: str, sections: Sequence[Section], origin: Provenance | None = None
) -> str:
    """Return the page.

    Args:
        title: The first line.
        sections: What was judged, one after the other.
        origin: Where the page comes from.
    """
    body = BODY.format(
        sections="".join(map(write_section, sections)),
    )
    return write_document(
        title,
        BASE_STYLE + STYLE,
        body,
        origin,
    )


def write_section(section: Section) -> str:
    """Return one log: verdict, findings with their numbers, what was not judged, and the picture."""
    rows = "".join(
        f'<tr><td class="number">{number}<td class="number">{one["step"]}<td><code>{escape(str(one["rule"]))}</code>'
        f'<td class="{TONES.get(str(one["severity"]), "mute")}">{escape(str(one["severity"]))}'
        f"<td>{escape(str(one['message']))}<td>{escape(str(one['causes']))}"
        for number, one in enumerate(section.findings, 1)
    )
    head = "<tr><th>no.<th>step<th>rule<th>severity<th>found<th>likely causes"
    found = (
        f'<div class="wide"><table>{head}{rows}</table></div>'
        if rows
        else "<p>Nothing was found.</p>"
    )
    skipped = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(reason)}"
        for name, reason in section.not_judged.items()
    )
    left = f"<h3>Not judged</h3><table>{skipped}</table>" if skipped else ""
    return (
        f'<h2>{escape(section.title)}</h2><p class="{section.tone}">{escape(section.verdict)}</p>'
        f'{found}<div class="wide">{section.picture}</div>{left}'
    )
