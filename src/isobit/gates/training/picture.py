"""A picture of loss curves by layout: how far each differs from the first, per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from isobit.foundation.records import Provenance
from isobit.report.markup import Canvas

Losses = Mapping[str, Sequence[float]]  # by layout; the others are compared with the first
LEFT, WIDTH, HEIGHT, TOP = 74, 330, 210, 58


def draw_curves(
    panels: Mapping[str, Mapping[str, Losses]], title: str, origin: Provenance | None = None
) -> str:
    """Draw a panel per dtype, with a line per layout: stock's in orange, isobit's in blue."""
    canvas = Canvas()
    canvas.text(LEFT, 22, title, "title")
    shown = [
        p
        for sides in panels.values()
        for losses in sides.values()
        for line in differences(losses)
        for p in line
    ]
    powers = [math.log10(p) for p in shown if 0 < p < math.inf]
    low = math.floor(min(powers, default=-8))
    high = max(math.ceil(max(powers, default=-1)), low + 1)
    for column, (name, sides) in enumerate(panels.items()):
        panel = draw_panel(name, sides, low, high, column == 0)
        canvas.place(panel, LEFT + column * (WIDTH + 26), TOP)
    bottom = TOP + HEIGHT + 44
    for column, (side, kind) in enumerate((("stock PyTorch", "differs"), ("isobit", "same"))):
        canvas.dot(LEFT + 8 + 130 * column, bottom - 4, 4, kind)
        canvas.text(LEFT + 18 + 130 * column, bottom, side)
    return canvas.document(
        LEFT + max(len(panels) * (WIDTH + 26), 8 * len(title)), bottom + 16, origin
    )


def draw_panel(
    name: str, sides: Mapping[str, Losses], low: int, high: int, labelled: bool
) -> Canvas:
    """Draw one panel; the y axis is the power of ten, above a line for exact zeros."""
    canvas = Canvas()
    counts = ", ".join(f"{side}: {len(losses)} layouts" for side, losses in sides.items())
    canvas.text(0, -10, f"{name} — {counts}", "quiet")
    canvas.panel(0, 0, WIDTH, HEIGHT)

    def height(value: float) -> float:
        if value <= 0:
            return HEIGHT - 18
        if not math.isfinite(value):  # a run that diverged, at the upper edge
            return 8
        return HEIGHT - 48 - (math.log10(value) - low) / (high - low) * (HEIGHT - 64)

    for power in range(low, high + 1):
        canvas.line(0, height(10.0**power), WIDTH, height(10.0**power), "axis hair")
        if labelled:
            canvas.text(-8, height(10.0**power) + 4, f"1e{power}", "quiet", "end")
    if labelled:
        canvas.text(-8, height(0) + 4, "exactly 0", "quiet", "end")
    # isobit last: the line of stock's first layout is at 0 too.
    for side, losses in sorted(sides.items(), reverse=True):
        kind = "same" if side == "isobit" else "differs"
        for layout, line in zip(losses, differences(losses), strict=True):
            draw_line(canvas, layout, line, height, kind)
    steps = max((len(line) for losses in sides.values() for line in losses.values()), default=1)
    for step in range(steps):
        canvas.text(place(step, steps), HEIGHT + 16, str(step + 1), "quiet", "middle")
    return canvas


def draw_line(
    canvas: Canvas, name: str, line: Sequence[float], height: Callable[[float], float], kind: str
) -> None:
    """Draw the line of a layout, with a dot per step."""
    at = [(place(step, len(line)), height(value)) for step, value in enumerate(line)]
    for (x0, y0), (x1, y1) in pairwise(at):
        canvas.line(x0, y0, x1, y1, f"{kind} hair", name)
    for step, ((x, y), value) in enumerate(zip(at, line, strict=True)):
        canvas.dot(x, y, 2, kind, f"{name}, step {step + 1}: {value:.3g}")


def place(step: int, steps: int) -> float:
    """Return the x coordinate of a step."""
    return 16 + step * (WIDTH - 32) / max(steps - 1, 1)


def differences(losses: Losses) -> list[list[float]]:
    """Return |loss − the first layout's|, one list per layout."""
    lines = list(losses.values())
    return [[abs(a - b) for a, b in zip(line, lines[0], strict=True)] for line in lines]
