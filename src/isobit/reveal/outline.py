"""Outlines: an order with its regular runs collapsed, for one-line descriptions and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from isobit.order.addition import Branch, Step, steps_of

# A shape is an order without its place. Shapes are numbered, so that equal ones are one number:
#   ("term",)
#   ("pairs", item, distances)            2^len(distances) equal items merged by pairs
#   ("fused", item, distance, count)      equal items in one addition
#   ("chain", before, item, offset, distance, count)
#                                         `before` (a chain or nothing), then equal items folded onto it
TERM, NOTHING = 0, -1
SHOWN_RUNS = 4


@dataclass(frozen=True)
class Run:
    """`count` equal items; `item` is the first, `distances` are between them (one per level for pairs)."""

    item: Outline
    count: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Outline:
    """One collapsed sum: a `term`, a `chain` of runs folded left, or one run added in `pairs` or `fused`."""

    kind: str
    anchor: int  # the first term of its first item
    size: int  # terms
    runs: tuple[Run, ...] = ()


def outline_of(branch: Branch) -> Outline:
    """Collapse an order from its leaves up."""
    if isinstance(branch, int):
        return Outline("term", branch, 1)
    shapes = _Shapes()
    nodes: list[tuple[int, int]] = []  # (shape, anchor) of each step
    for step in steps_of(branch):
        nodes.append(shapes.add(_operands(step, nodes)))
    return shapes.outline(*nodes[-1])


def _operands(step: Step, nodes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(TERM, ~child) if child < 0 else nodes[child] for child in step]


class _Shapes:
    """Numbers the shapes of one order."""

    def __init__(self) -> None:
        self.known: list[tuple[object, ...]] = [("term",)]
        self.sizes = [1]
        self.numbers: dict[tuple[object, ...], int] = {("term",): TERM}

    def number(self, key: tuple[object, ...], size: int) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.known)
            self.known.append(key)
            self.sizes.append(size)
        return self.numbers[key]

    def add(self, operands: list[tuple[int, int]]) -> tuple[int, int]:
        """Return the shape and anchor of one addition."""
        # The larger operand was summed before; of equal ones the earlier.
        operands = sorted(operands, key=lambda o: (-self.sizes[o[0]], o[1]))
        if len(operands) > 2:
            return self._fuse(operands)
        (left, at), (right, where) = operands
        return self._extend(left, at, right, where) or self._pair(left, at, right, where)

    def _fuse(self, operands: list[tuple[int, int]]) -> tuple[int, int]:
        (item, at), (_, second) = operands[:2]
        gap = second - at
        if all(o == (item, at + i * gap) for i, o in enumerate(operands)):
            size = self.sizes[item] * len(operands)
            return self.number(("fused", item, gap, len(operands)), size), at
        offsets = tuple((shape, where - at) for shape, where in operands)
        return self.number(
            ("fused all", offsets), sum(self.sizes[shape] for shape, _ in operands)
        ), at

    def _chain(self, before: int, item: int, offset: int, gap: int, count: int) -> int:
        size = (0 if before == NOTHING else self.sizes[before]) + self.sizes[item] * count
        return self.number(("chain", before, item, offset, gap, count), size)

    def _extend(self, left: int, at: int, right: int, where: int) -> tuple[int, int] | None:
        """Extend the left operand, if the right one is one more of its last items."""
        kind, *rest = self.known[left]
        if kind == "pairs":  # two items may turn out to be the start of a chain
            item, distances = rest
            assert isinstance(distances, tuple)
            gap = distances[-1]
            part = self.numbers.get(("pairs", item, distances[:-1])) if len(distances) > 1 else item
            if part == right and where == at + 2 * gap:
                return self._chain(NOTHING, right, 0, gap, 3), at
            if part == right and where == at - gap:
                return self._chain(NOTHING, right, 0, -gap, 3), at + gap
        if kind == "chain":
            before, item, offset, gap, count = (int(v) for v in rest)  # type: ignore[call-overload]
            if item == right and count == 1:
                return self._chain(before, item, offset, where - at - offset, 2), at
            if item == right and where == at + offset + gap * count:
                return self._chain(before, item, offset, gap, count + 1), at
        return None

    def _pair(self, left: int, at: int, right: int, where: int) -> tuple[int, int]:
        if left == right:
            kind, *rest = self.known[left]
            item, distances = rest if kind == "pairs" else (left, ())
            assert isinstance(distances, tuple)
            return self.number(("pairs", item, (*distances, where - at)), 2 * self.sizes[left]), at
        return self._chain(self._as_chain(left), right, where - at, 0, 1), at

    def _as_chain(self, shape: int) -> int:
        kind, *rest = self.known[shape]
        if kind == "chain":
            return shape
        if kind == "pairs" and rest[0] == TERM and len(rest[1]) == 1:  # type: ignore[arg-type]
            return self._chain(NOTHING, TERM, 0, rest[1][0], 2)  # type: ignore[index]
        return self._chain(NOTHING, shape, 0, 0, 1)

    def outline(self, shape: int, at: int) -> Outline:
        """Return the outline of a shape at its place."""
        kind, *rest = self.known[shape]
        size = self.sizes[shape]
        if kind == "term":
            return Outline("term", at, 1)
        if kind == "pairs":
            item, distances = rest
            assert isinstance(distances, tuple)
            assert isinstance(item, int)
            return Outline(
                "pairs", at, size, (Run(self.outline(item, at), 2 ** len(distances), distances),)
            )
        if kind == "fused":
            item, gap, count = (int(v) for v in rest)  # type: ignore[call-overload]
            return Outline("fused", at, size, (Run(self.outline(item, at), count, (gap,)),))
        if kind == "fused all":
            (offsets,) = rest
            assert isinstance(offsets, tuple)
            return Outline(
                "fused", at, size, tuple(Run(self.outline(s, at + o), 1, (0,)) for s, o in offsets)
            )
        runs: list[Run] = []
        while shape != NOTHING:
            shape, item, offset, gap, count = (int(v) for v in self.known[shape][1:])  # type: ignore[call-overload]
            runs.append(Run(self.outline(item, at + offset), count, (gap,)))
        return Outline("chain", at, size, tuple(reversed(runs)))


def count_lead(outline: Outline) -> int:
    """Count the runs of single terms at the start of a chain: they are one chain with uneven steps."""
    return next(
        (at for at, run in enumerate(outline.runs) if run.item.kind != "term"), len(outline.runs)
    )


def describe(outline: Outline) -> str:
    """Describe in one line, as in `16 stripes of 64, folded, then pairs`."""
    if outline.kind == "term":
        return "1 term"
    if outline.kind == "chain" and len(outline.runs) > 1:
        parts, others = [], list(outline.runs)
        lead = count_lead(outline)
        if lead > 1:
            parts, others = (
                [f"chain of {sum(run.count for run in outline.runs[:lead])}, uneven"],
                others[lead:],
            )
            if not others:
                return parts[0]
        parts += [_describe_run(run, "folded") for run in others[: SHOWN_RUNS - len(parts)]]
        more = len(others) + (lead > 1) - SHOWN_RUNS
        return " + ".join(f"({text})" for text in parts) + (f" + … {more} more" if more > 0 else "")
    if outline.kind == "fused" and len(outline.runs) > 1:
        return f"{len(outline.runs)} sums fused in one addition"
    (run,) = outline.runs
    return _describe_run(run, {"chain": "folded", "pairs": "pairs", "fused": "fused"}[outline.kind])


def _describe_run(run: Run, merged: str) -> str:
    item, count = run.item, run.count
    gap = run.distances[0]
    if count == 1:
        return f"term {item.anchor}" if item.kind == "term" else describe(item)
    if item.kind == "term":
        if merged == "folded":
            return f"chain of {count}" + (
                "" if gap == 1 else ", descending" if gap == -1 else f", {gap} apart"
            )
        return (
            f"{count} fused"
            if merged == "fused"
            else f"{count} in pairs" + _describe_distances(run)
        )
    ending = {"folded": "folded", "pairs": "pairs" + _describe_distances(run), "fused": "fused"}[
        merged
    ]
    inner = item.runs[0]
    if item.kind == "chain" and len(item.runs) == 1 and inner.item.kind == "term":
        if inner.distances == (count,) and sorted(
            abs(d) for d in run.distances
        ) == _stripe_distances(run, merged):
            return f"{count} stripes of {inner.count}, folded, then {ending}"
        if inner.distances == (1,):
            return f"{count} chains of {inner.count}, then {ending}"
    return f"{count} × ({describe(item)}), then {ending}"


def _stripe_distances(run: Run, merged: str) -> list[int]:
    """Return the distances at which stripes that begin one after another are merged."""
    return [1 << level for level in range(len(run.distances))] if merged == "pairs" else [1]


def _describe_distances(run: Run) -> str:
    distances = run.distances
    if len(distances) == 1 or all(b == 2 * a for a, b in pairwise(distances)):
        return ""
    if all(a == 2 * b for a, b in pairwise(distances)):
        return ", far ones first"
    return f" {', '.join(str(d) for d in distances)} apart"
