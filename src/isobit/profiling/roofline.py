"""Draw bricks against their bounds: a roofline as SVG for the report, in its colours, for wide and narrow pages.

A brick is a circle whose area is its share of the work. In the right half its height below the roof is how far it is
from its bound; both axes are logarithmic. Operators that only move data have no operations: they are in the left half,
the longest first, by the share of the memory's rate that they reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isobit.profiling.bounds import Machine, machine_of
from isobit.profiling.records import Brick, RankProfile
from isobit.report.markup import escape

MOST, NUMBERED = 60, 8  # circles; those with a number
LEAST = 0.001  # of the work, below which a brick is not drawn
SLOW = 0.25  # of the bound, below which a circle is red
RATES = {"float": "fp32", "Half": "fp16", "BFloat16": "bf16"}
STYLE = """
.roof{display:block;width:100%;height:auto;margin:.4rem 0}.roof.narrow{display:none}
.roof text{font:12px ui-sans-serif,system-ui,sans-serif;fill:currentColor}.roof .grid{stroke:#8883}
.roof .line{stroke:currentColor;stroke-width:1.5;fill:none}
.roof circle{fill:var(--compute);fill-opacity:.55;stroke:var(--compute)}
.roof circle.slow{fill:var(--bad);stroke:var(--bad)}.roof circle.cached{fill:none;stroke-dasharray:3 2}
.roof .number{text-anchor:middle;font-weight:600}.roofkey{columns:2 18rem;font-size:.85rem;padding-left:1.4rem}
@media (max-width:640px){.roof.wide{display:none}.roof.narrow{display:block}}"""


@dataclass(frozen=True)
class Circle:
    """A brick in the drawing: operations per byte, 0 if it only moves data; shares of its bound and of the work."""

    brick: Brick
    intensity: float
    of_bound: float
    share: float


def write_roofline(rank: RankProfile) -> str:
    """Return the drawing of a rank's bricks with its key; "" if there are no bounds or no rates for the device."""
    machine = machine_of(rank.device)
    circles = circles_of(rank)
    if machine is None or not circles:
        return ""
    rest = max(0.0, 1 - sum(circle.share for circle in circles))
    drawings = "".join(
        Drawing(circles, machine, *size).svg()
        for size in (("wide", 900, 380), ("narrow", 400, 340))
    )
    key = "".join(
        f'<li>{escape(one.brick.operator)} <span class="mute">{escape(one.brick.shapes)}</span>, {escape(said(one))}'
        for one in circles[:NUMBERED]
    )
    return (
        '<p class="mute">Each circle is a brick, its area its share of the work; lines are what the device can do at '
        f"most. Red is below {SLOW:.0%} of the bound; dashed is faster than memory, from the cache. Not drawn: "
        f'{rest:.1%} of the work.</p>{drawings}<ol class="roofkey">{key}</ol>'
    )


def circles_of(rank: RankProfile) -> list[Circle]:
    """Return the bricks with a known need, the longest first."""
    found = [
        Circle(brick, brick.flops / brick.moved, brick.of_bound or 1.0, brick.ns / rank.device_time)
        for brick in rank.bricks
        if brick.kind == "kernel"
        and brick.moved
        and brick.bound_by
        and brick.ns >= LEAST * rank.device_time > 0
    ]
    return found[:MOST]


def said(one: Circle) -> str:
    """Return how far a brick is from its bound, in words."""
    if one.brick.bound_by == "cache":
        return "faster than memory, from the cache"
    return f"{one.of_bound:.0%} of the bound by {one.brick.bound_by}"


class Drawing:
    """One SVG: operators that only move data at the left, the roofline at the right."""

    top, bottom, left, right, between = 30, 38, 40, 12, 52

    def __init__(
        self, circles: Sequence[Circle], machine: Machine, name: str, width: int, height: int
    ) -> None:
        self.circles, self.machine, self.name = circles, machine, name
        self.width, self.height = width, height
        self.products = [one for one in circles if one.intensity]
        self.moves = [one for one in circles if not one.intensity]
        self.peaks = peaks_of(self.products, machine)
        self.base = height - self.bottom  # where the axes are
        share = 0.42 if self.products and self.moves else 1.0 if self.moves else 0.0
        inner = width - self.left - self.right - (self.between if 0 < share < 1 else 0)
        self.split = self.left + share * inner  # the right end of the left half
        self.begin = self.split + (self.between if 0 < share < 1 else 0)
        logs = [math.log10(one.intensity) for one in self.products] or [0.0]
        knees = [math.log10(peak / machine.memory) for peak in self.peaks.values()] or [0.0]
        self.least, self.most = min(*logs, *knees) - 1, max(*logs, *knees) + 1.3
        speeds = [speed_of(one) for one in self.products] or [0.0]
        roofs = [math.log10(peak) for peak in self.peaks.values()] or [1.0]
        self.floor, self.roof = min(*speeds, *roofs) - 0.4, max(*speeds, *roofs) + 0.25

    def across(self, value: float) -> float:
        """Return the place of a logarithm of operations per byte."""
        return self.begin + (value - self.least) / (self.most - self.least) * (
            self.width - self.right - self.begin
        )

    def up(self, value: float) -> float:
        """Return the place of a logarithm of TFLOP/s."""
        return self.base - (value - self.floor) / (self.roof - self.floor) * (self.base - self.top)

    def share(self, value: float) -> float:
        """Return the place of a share of the memory's rate."""
        return self.base - value * (self.base - self.top) / 1.05

    def svg(self) -> str:
        """Return the drawing."""
        parts: list[str] = []
        if self.moves:
            parts += self.left_half()
        if self.products:
            parts += self.right_half()
        words = f"{len(self.circles)} bricks against the bounds of {self.machine.name}"
        return (
            f'<svg class="roof {self.name}" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(words)}">{"".join(parts)}</svg>'
        )

    def left_half(self) -> Iterator[str]:
        """Yield operators that only move data."""
        for percent in (0, 25, 50, 75, 100):
            y = self.share(percent / 100)
            kind = "line" if percent == 100 else "grid"
            yield line(kind, self.left, y, self.split, y)
            yield text(self.left - 6, y + 4, f"{percent}%", "end")
        yield text(self.left, 14, f"of {self.machine.memory:g} TB/s")
        yield text(self.split, self.base + 18, "only move data", "end")
        room = self.split - self.left - 30
        for at, one in reversed(list(enumerate(self.moves))):
            x = self.left + 18 + room * at / max(1, len(self.moves) - 1)
            yield self.circle(one, x, self.share(min(one.of_bound, 1.0)))

    def right_half(self) -> Iterator[str]:
        """Yield the roofs, and the products below them."""
        slope = math.log10(self.machine.memory)
        for decade in range(math.ceil(self.least), math.floor(self.most) + 1):
            x = self.across(decade)
            yield line("grid", x, self.top, x, self.base)
            yield text(x, self.base + 16, f"{10.0**decade:g}", "middle")
        for decade in range(math.ceil(self.floor), math.floor(self.roof) + 1):
            y = self.up(decade)
            yield line("grid", self.begin, y, self.width - self.right, y)
            yield text(self.begin - 6, y + 4, f"{10.0**decade:g}", "end")
        yield text(self.begin, 14, "TFLOP/s")
        yield text(self.width - self.right, self.height - 6, "operations per byte", "end")
        start = max(self.least, self.floor - slope)
        for label, peak in self.peaks.items():
            level = math.log10(peak)
            points = [(start, start + slope), (level - slope, level), (self.most, level)]
            places = " ".join(f"{self.across(x):.1f},{self.up(y):.1f}" for x, y in points)
            yield f'<polyline class="line" points="{places}"/>'
            beside = -6 if peak == max(self.peaks.values()) else 14
            yield text(self.width - self.right, self.up(level) + beside, f"{label} {peak:g}", "end")
        for one in reversed(self.products):
            yield self.circle(one, self.across(math.log10(one.intensity)), self.up(speed_of(one)))

    def circle(self, one: Circle, x: float, y: float) -> str:
        """Return the circle of one brick, with its number if it is one of the longest."""
        number = self.circles.index(one) + 1
        radius = 4 + 20 * math.sqrt(min(1.0, one.share))
        cached = one.brick.bound_by == "cache"
        kind = "cached" if cached else "slow" if one.of_bound < SLOW else ""
        words = f"{one.brick.operator} {one.brick.shapes}: {one.brick.ns / 1e6:,.3f} ms, {one.share:.1%} of the work, "
        label = f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}">{number}</text>'
        return (
            f"<g><title>{escape(words + said(one))}</title>"
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"/>'
            f"{label if number <= NUMBERED else ''}</g>"
        )


def peaks_of(products: Sequence[Circle], machine: Machine) -> dict[str, float]:
    """Return the rates of the dtypes of products, in TFLOP/s; equal ones share a label."""
    found: dict[float, set[str]] = {}
    for one in products:
        name = RATES.get(one.brick.dtypes.split(" ")[0], "fp8")
        found.setdefault(machine.flops(name) / 1e12, set()).add(name)
    return {", ".join(sorted(names)): peak for peak, names in sorted(found.items())}


def speed_of(one: Circle) -> float:
    """Return the logarithm of the TFLOP/s that a brick reached."""
    return math.log10(one.brick.flops / one.brick.ns / 1e3)


def line(kind: str, x: float, y: float, to: float, down: float) -> str:
    """Return a straight line."""
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to:.1f}" y2="{down:.1f}"/>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
