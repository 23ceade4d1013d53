"""Draw the plan of an extent: its segments and tree. Run by hand; tests compare the result.

python docs/pictures/draw_plan.py writes plan_1536.svg and plan_14336.svg beside this file.
"""

from pathlib import Path

from isobit.order.plan import FeaturePlan
from isobit.report.markup import Canvas

WIDTH, LEFT, ROW = 900, 100, 64


def draw(extent: int) -> str:
    """Return an SVG with one row each for the extent, its segments with their leaves, and the tree."""
    plan, canvas = FeaturePlan(extent), Canvas()
    scale = (WIDTH - LEFT - 40) / extent
    canvas.text(10, 20, f"The plan of a feature axis of {extent} elements", "title")
    for row, words in enumerate(("extent", "segments", "tree")):
        canvas.text(10, 60 + row * ROW, words)
    box(canvas, LEFT, 0, extent * scale, f"{extent} elements", "axis")
    for index, leaves in enumerate(plan.products):
        words = f"{index}: {plan.length}" if plan.count > 4 else f"segment {index}: {plan.length}"
        canvas.text(LEFT + (index + 0.5) * plan.length * scale, 54 + ROW, words, "quiet", "middle")
        for leaf in leaves:
            box(canvas, LEFT + leaf.start * scale, 1, leaf.length * scale, "", "same")
    depth = draw_tree(canvas, [LEFT + (i + 0.5) * plan.length * scale for i in range(plan.count)])
    return canvas.document(WIDTH, 60 + 2 * ROW + depth * 44 + 60)


def box(canvas: Canvas, x: float, row: int, width: float, words: str, kind: str) -> None:
    """Draw one part of a row as a bar with its label above."""
    y = 60 + row * ROW
    canvas.line(x + 1, y + 8, x + width - 1, y + 8, f"bar {kind}")
    canvas.text(x + width / 2, y - 6, words, "quiet", "middle")


def draw_tree(canvas: Canvas, places: list[float]) -> int:
    """Draw the additions of neighbours, level by level, and return the number of levels."""
    y, level, terms = 60 + 2 * ROW - 8, 0, [str(i) for i in range(len(places))]
    for x, words in zip(places, terms, strict=True):
        canvas.dot(x, y, 4, "same")
        canvas.text(x + 8, y + 4, f"sum {words}", "quiet")
    while len(places) > 1:
        level += 1
        below = y + level * 44
        pairs = list(zip(places[::2], places[1::2], strict=True))
        for left, right in pairs:
            for x in (left, right):
                canvas.line(x, below - 44, (left + right) / 2, below, "same")
        places = [(left + right) / 2 for left, right in pairs]
        terms = [f"({a} + {b})" for a, b in zip(terms[::2], terms[1::2], strict=True)]
        for x, words in zip(places, terms, strict=True):
            canvas.dot(x, below, 4, "same")
            canvas.text(x + 8, below + 14, words, "quiet")
    rounding = "one rounding to the output dtype"
    canvas.text(places[0], y + level * 44 + 34, rounding, "", "middle")
    return level


if __name__ == "__main__":
    for extent in (1536, 14336):
        Path(__file__).with_name(f"plan_{extent}.svg").write_text(draw(extent))
