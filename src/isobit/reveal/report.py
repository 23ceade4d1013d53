"""A revealed order as a picture, and a certificate as a self-contained HTML report; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from isobit.foundation.records import Provenance
from isobit.order.addition import step_digests, steps_of
from isobit.report.markup import Canvas, escape
from isobit.report.pages import BASE_STYLE, write_document
from isobit.reveal.certificate import OrderClass, OrderComparison
from isobit.reveal.outline import Outline, Run, count_lead, describe
from isobit.reveal.tree import Tree

# Draw one order of addition: terms on the horizontal axis, sums above them, regular runs collapsed.

WIDTH, LEFT, RIGHT, ROW = 560, 14, 132, 20
WHOLE_TREE = 32  # the largest number of terms for which every addition is drawn
WORDS = 110  # pixels that "⋯ 128 of these ⋯" needs
SIDE_BY_SIDE, STACKED, DOTS, SMALLEST = 16, 5, 33, 30  # items, items, dots, pixels


@dataclass(frozen=True)
class _End:
    """Where the sum of something drawn ends: its coordinates, and a term below it."""

    x: float
    row: float
    term: int


class OrderPicture:
    """One drawing; `others` are the digests of the additions of each other order."""

    def __init__(self, tree: Tree, others: Sequence[set[bytes]] = ()) -> None:
        self.n = tree.n
        self.steps = steps_of(tree.branch)
        self.kinds = [
            _kind(sum(made in other for other in others), len(others))
            for made in step_digests(self.steps)
        ]
        self.parents = [-1] * (self.n + len(self.steps))
        for at, step in enumerate(self.steps):
            for child in step:
                self.parents[~child if child < 0 else self.n + child] = at
        self.canvas = Canvas()
        self.marks: list[tuple[str, tuple[float, ...], str, str]] = []
        self.top = 0.0
        end = self._draw_whole() if self.n <= WHOLE_TREE else self._draw(tree.outline, 0, 0.0)
        self._line(end.x, end.row, end.x, end.row + 0.7, self._joined(end.term, end.term))
        self._note(end.x + 5, end.row + 0.6, "sum", "quiet")
        self.height = (self.top + 3.2) * ROW
        self._flush()

    def _x(self, term: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (term / max(self.n - 1, 1))

    def _line(self, x0: float, r0: float, x1: float, r1: float, kind: str, title: str = "") -> None:
        self.marks.append(("line", (x0, r0, x1, r1), kind, title))
        self.top = max(self.top, r0, r1)

    def _dot(self, x: float, row: float, radius: float, kind: str, title: str = "") -> None:
        self.marks.append(("dot", (x, row, radius), kind, title))
        self.top = max(self.top, row)

    def _note(
        self, x: float, row: float, words: str, kind: str = "", anchor: str = "start"
    ) -> None:
        self.marks.append((f"text {anchor}", (x, row), kind, words))
        self.top = max(self.top, row)

    def _flush(self) -> None:
        """Turn rows into heights, now that the highest is known, and draw the axis."""
        base = self.height - 1.6 * ROW
        for shape, place, kind, words in self.marks:
            if shape == "line":
                x0, r0, x1, r1 = place
                self.canvas.line(x0, base - r0 * ROW, x1, base - r1 * ROW, kind, words)
            elif shape == "dot":
                x, row, radius = place
                self.canvas.dot(x, base - row * ROW, radius, kind, words)
            else:
                x, row = place
                self.canvas.text(x, base - row * ROW, words, kind, shape.split()[1])
        low = base + 0.6 * ROW
        self.canvas.line(self._x(0), low, self._x(self.n - 1), low, "axis hair")
        for term in sorted({0, (self.n - 1) // 2, self.n - 1}):
            self.canvas.line(self._x(term), low, self._x(term), low + 4, "axis hair")
            self.canvas.text(self._x(term), low + 15, str(term), "quiet", "middle")

    def _kind_of_term(self, term: int) -> str:
        """Return how many other orders make the addition of this term, as a colour class."""
        return "same" if self.parents[term] < 0 else self.kinds[self.parents[term]]

    def _joined(self, left: int, right: int) -> str:
        """Return the same for the addition where two terms meet; of a term with itself, for the last."""
        if left == right:
            return self.kinds[-1] if self.kinds else "same"
        above = set()
        at = self.parents[left]
        while at >= 0:
            above.add(at)
            at = self.parents[self.n + at]
        at = self.parents[right]
        while at not in above:
            at = self.parents[self.n + at]
        return self.kinds[at]

    def _draw_whole(self) -> _End:
        """Draw every term and every addition."""
        ends: list[_End] = []
        for term in range(self.n):
            self._dot(self._x(term), 0, 2.6, self._kind_of_term(term), f"term {term}")
        if not self.steps:
            return _End(self._x(0), 0, 0)
        squeeze = min(1.0, 14 / len(self.steps))
        for at, step in enumerate(self.steps):
            parts = [_End(self._x(~c), 0, ~c) if c < 0 else ends[c] for c in step]
            x = sum(p.x for p in parts) / len(parts)
            row = max(p.row for p in parts) + max(squeeze, 0.55)
            kind = self.kinds[at]
            for part in parts:
                self._line(part.x, part.row, part.x, row, kind)
            self._line(min(p.x for p in parts), row, max(p.x for p in parts), row, kind)
            self._dot(x, row, 2.6, kind, " + ".join(f"{p.term}…" for p in parts))
            ends.append(_End(x, row, parts[0].term))
        return ends[-1]

    def _draw(self, outline: Outline, shift: int, row: float) -> _End:
        """Draw a collapsed sum with its lowest line at `row`."""
        if outline.kind == "term":
            term = outline.anchor + shift
            self._dot(self._x(term), row, 2.6, self._kind_of_term(term), f"term {term}")
            return _End(self._x(term), row, term)
        lead = count_lead(outline) if outline.kind == "chain" else 0
        if outline.runs and lead == len(outline.runs):
            return self._draw_chain(outline.runs, shift, row)
        low, high = _span(outline, shift)
        if self._x(high) - self._x(low) < SMALLEST:
            return self._draw_block(outline, low, high, row)
        items = _items(outline, shift, lead)
        spans = sorted(_span(item, moved) for item, moved in items)
        if all(a[1] < b[0] for a, b in pairwise(spans)):
            return self._draw_beside(outline, items, row)
        return self._draw_stacked(outline, items, row)

    def _draw_chain(self, runs: Sequence[Run], shift: int, row: float) -> _End:
        """Draw a bar for adjacent terms, or dots on a line for separate ones; the sum ends at the last."""
        terms = [
            run.item.anchor + shift + run.distances[0] * k for run in runs for k in range(run.count)
        ]
        first, last = terms[0], terms[-1]
        gaps = {b - a for a, b in pairwise(terms)}
        apart = f", {gaps.pop()} apart" if len(gaps) == 1 else ", uneven"
        title = f"{len(terms)} terms from {first} to {last}, one after another{apart}"
        if apart in (", 1 apart", ", -1 apart"):
            for kind, group in groupby(terms, key=self._kind_of_term):
                run = list(group)
                ends = sorted((self._x(run[0]), self._x(run[-1])))
                self._line(ends[0], row, max(ends[1] - 1.5, ends[0] + 1), row, f"bar {kind}", title)
        else:
            self._line(
                self._x(min(terms)),
                row,
                self._x(max(terms)),
                row,
                f"hair {self._kind_of_term(last)}",
                title,
            )
            for term in terms[:: max(1, len(terms) // DOTS)]:
                self._dot(self._x(term), row, 1.8, self._kind_of_term(term))
            return _End(self._x(max(terms)), row, last)
        wide = abs(self._x(last) - self._x(first))
        if wide > 20:
            words = f"{len(terms)}" if wide < 90 else f"chain of {len(terms)}"
            words += "" if first < last else ", descending"
            self._note((self._x(first) + self._x(last)) / 2, row + 0.32, words, "quiet", "middle")
        return _End(self._x(last), row, last)

    def _draw_block(self, outline: Outline, low: int, high: int, row: float) -> _End:
        """Draw one bar for what is too small to show; its description appears on hovering."""
        kind = self._kind_of_term(low)
        self._line(
            self._x(low),
            row,
            max(self._x(high) - 1.5, self._x(low) + 1),
            row,
            f"bar {kind}",
            describe(outline),
        )
        return _End(self._x(high), row, high)

    def _draw_beside(self, outline: Outline, items: list[tuple[Outline, int]], row: float) -> _End:
        """Draw items that do not overlap side by side, merged above."""
        count = len(items)
        shown = items if count <= SIDE_BY_SIDE else [items[0], items[1], items[-1]]
        ends = [self._draw(item, moved, row) for item, moved in shown]
        tops = max(end.row for end in ends) + 0.9
        if count > len(shown):
            gap, words = ends[2].x - ends[1].x, f"⋯ {count} of these ⋯"
            if gap < WORDS:
                self._note(ends[2].x + 8, row, words, "quiet")
            else:
                self._note(ends[1].x + gap / 2, row, words, "quiet", "middle")
        if outline.kind == "pairs" and count == len(shown):
            return self._merge_pairs(ends, tops)
        kinds = [self._joined(ends[0].term, end.term) for end in ends[1:]]
        word = {"chain": "folded", "pairs": "in pairs", "fused": "fused in one addition"}[
            outline.kind
        ]
        self._line(ends[0].x, ends[0].row, ends[0].x, tops, kinds[0])
        for before, end, kind in zip(ends, ends[1:], kinds, strict=False):
            self._line(end.x, end.row, end.x, tops, kind)
            self._line(before.x, tops, end.x, tops, kind)
            self._dot(end.x, tops, 3.2, kind, f"{word}: term {ends[0].term}… + term {end.term}…")
        if abs(ends[-1].x - ends[0].x) > 60:
            self._note((ends[0].x + ends[-1].x) / 2, tops + 0.25, word, "quiet", "middle")
        return _End(ends[-1].x, tops, ends[-1].term)

    def _merge_pairs(self, ends: list[_End], row: float) -> _End:
        while len(ends) > 1:
            merged = []
            for left, right in zip(ends[0::2], ends[1::2], strict=True):
                kind = self._joined(left.term, right.term)
                for end in (left, right):
                    self._line(end.x, end.row, end.x, row, kind)
                self._line(left.x, row, right.x, row, kind)
                middle = (left.x + right.x) / 2
                self._dot(middle, row, 3.2, kind, f"term {left.term}… + term {right.term}…")
                merged.append(_End(middle, row, left.term))
            ends, row = merged, row + 0.9
        return ends[0]

    def _draw_stacked(self, outline: Outline, items: list[tuple[Outline, int]], row: float) -> _End:
        """Draw items that overlap (stripes) one above another, merged at the right."""
        count = len(items)
        alike = len(outline.runs) == 1
        shown = items if count <= STACKED else [*items[: 2 if alike else 4], items[-1]]
        hidden = f"⋮ {count} of these ⋮" if alike else f"⋮ {count - len(shown)} more ⋮"
        ends: list[_End] = []
        for place, (item, moved) in enumerate(shown):
            if count > len(shown) and place == len(shown) - 1:
                self._note(self._x((self.n - 1) / 2), row - 0.15, hidden, "quiet", "middle")
                row += 0.9
            before = self.top
            self.top = row
            ends.append(self._draw(item, moved, row))
            row, self.top = self.top + 0.9, max(self.top, before)
        plain = all(item.kind == "term" or item.runs[0].item.kind == "term" for item, _ in shown)
        x = max(end.x for end in ends) + (12 if plain else 38)
        kinds = [self._joined(ends[0].term, end.term) for end in ends[1:]]
        for end, kind in zip(ends, [kinds[0], *kinds], strict=True):
            self._line(end.x, end.row, x, end.row, kind)
        for low, high, kind in zip(ends, ends[1:], kinds, strict=False):
            self._line(x, low.row, x, high.row, kind)
        word = {"chain": "fold", "pairs": "pairs", "fused": "fused"}[outline.kind]
        self._note(x + 4, (ends[0].row + ends[-1].row) / 2 - 0.2, word, "quiet")
        self._dot(x, ends[-1].row, 3.2, kinds[-1], f"{count} sums, {word}")
        return _End(x, ends[-1].row, ends[-1].term)


def _kind(others_that_do: int, others: int) -> str:
    return "same" if others_that_do == others else "shared" if others_that_do else "differs"


def _items(outline: Outline, shift: int, lead: int) -> list[tuple[Outline, int]]:
    """Return every item of every run with its offset from the first; leading terms are one item."""
    found = []
    if lead:
        runs = outline.runs[:lead]
        found.append(
            (Outline("chain", outline.anchor, sum(run.count for run in runs), runs), shift)
        )
    for run in outline.runs[lead:]:
        if outline.kind == "pairs":
            moves = [0]
            for distance in run.distances:
                moves = moves + [m + distance for m in moves]
        else:
            moves = [run.distances[0] * k for k in range(run.count)]
        found += [(run.item, shift + move) for move in moves]
    return found


def _span(outline: Outline, shift: int) -> tuple[int, int]:
    """Return the first and last term of an outline."""
    if outline.kind == "term":
        return outline.anchor + shift, outline.anchor + shift
    spans = [_span(item, moved) for item, moved in _ends_of(outline, shift)]
    return min(low for low, _ in spans), max(high for _, high in spans)


def _ends_of(outline: Outline, shift: int) -> list[tuple[Outline, int]]:
    found = []
    for run in outline.runs:
        far = sum(run.distances) if outline.kind == "pairs" else run.distances[0] * (run.count - 1)
        found += [(run.item, shift), (run.item, shift + far)]
    return found


# A certificate as one picture of its orders side by side, and as a self-contained HTML page.

GAP, HEAD = 16, 62
WORDS_A_LINE = 86

PAGE_STYLE = """
body{max-width:1180px}table{width:auto;margin:1rem 0}
svg{max-width:100%;height:auto}.note{color:var(--mute)}.wide table{min-width:50rem}
"""
BODY = """<p class="verdict">{verdict}</p><p class="note">{legend}</p>{picture}{table}{refused}
"""
LEGEND = (
    "Terms run along the horizontal axis; a bar is a chain of neighbours, dots on a line a chain of separate "
    "terms, a junction an addition. Blue: every order here makes this addition; violet: some others do; orange: none."
)
COLUMNS = (
    "configurations",
    "order",
    "arithmetic",
    "differs from the first",
    "digest",
    "probes, replayed",
)


def draw_certificate(
    certificate: OrderComparison, title: str = "", origin: Provenance | None = None
) -> str:
    """Draw every class of configurations in its own panel."""
    made = [set(step_digests(steps_of(c.tree.branch))) for c in certificate.classes]
    pictures = [
        OrderPicture(c.tree, [other for other in made if other is not made[at]])
        for at, c in enumerate(certificate.classes)
    ]
    columns = 1 if len(pictures) == 1 else 2
    whole = Canvas()
    y = 30.0 if title else 6.0
    if title:
        whole.text(6, 19, title, "title")
    for at in range(0, len(pictures), columns):
        row = pictures[at : at + columns]
        height = max(p.height for p in row) + HEAD
        for column, picture in enumerate(row):
            x = 4 + column * (WIDTH + GAP)
            whole.panel(x, y, WIDTH, height)
            _head(whole, certificate.classes[at + column], x + 12, y + 20)
            whole.place(picture.canvas, x, y + height - picture.height)
        y += height + GAP
    return whole.document(8 + columns * WIDTH + (columns - 1) * GAP, y, origin)


def _head(canvas: Canvas, found: OrderClass, x: float, y: float) -> None:
    canvas.text(x, y, _cut(found.label, 70), "title")
    canvas.text(x, y + 17, _cut(str(found.tree), WORDS_A_LINE))
    canvas.text(
        x, y + 33, _cut(str(found.tree.arithmetic or "arithmetic not seen"), WORDS_A_LINE), "quiet"
    )


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else words[: room - 1] + "…"


def write_page(certificate: OrderComparison, title: str, origin: Provenance | None = None) -> str:
    """Return the page: picture, legend, and numbers."""
    verdict = (
        f"One order in {certificate.count} configurations: {certificate.claim}."
        if certificate.kept
        else f"{len(certificate.classes)} orders in {certificate.count} configurations."
    )
    rows = "".join(_row(found) for found in certificate.classes)
    heads = "".join(f"<th>{name}" for name in COLUMNS)
    table = f'<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>'
    refused = "".join(
        f"<p><b>{escape(found.label)}</b>: {found.tree.unlike} places of a call add in another order still.</p>"
        for found in certificate.classes
        if found.tree.unlike
    )
    refused += "".join(
        f"<p><b>{escape(name)}</b> could not be shown: {escape(reason)}</p>"
        for name, reason in certificate.refused
    )
    picture = draw_certificate(certificate) if certificate.classes else ""
    body = BODY.format(
        verdict=escape(verdict),
        picture=picture,
        table=table,
        refused=refused,
        legend=LEGEND,
    )
    return write_document(
        title,
        BASE_STYLE + PAGE_STYLE,
        body,
        origin,
    )


def _row(found: OrderClass) -> str:
    difference = f"{found.parting[0]} there; {found.parting[1]} here" if found.parting else ""
    cells = (
        found.label,
        str(found.tree),
        str(found.tree.arithmetic or "not seen"),
        difference,
        found.tree.digest[:16],
        f"{found.tree.probes}, {found.tree.replayed}",
    )
    return "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
