"""Find which entries of two dumps are the same place of the program.

[Note: Four ways]
*exact*: groups of one module, operator and tags that have as many calls on both sides are paired by call number. A
group of which one side has more calls is left for later: its call numbers would pair calls that are not the same.
*names*: the same after normalising names and leaving out a root that all paths of one side share.
*sequence*: what remains between two pairs that are already known is aligned with the fewest edits, by normalised names:
first with the same shapes, then with any.
*renamed*: what still remains there is aligned by operator, last part of the path and shape, then without the path.
Entries without a module (logs without `record_nn_module`) are aligned by sequence alone. What has no partner after
that is returned, never dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from isobit.comparing.dumps.records import EXACT, NAMES, RENAMED, SEQUENCE, Entry

# Normalise names of modules and operators, so that two programs' names for one place are equal.

_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUMBER_AFTER = re.compile(r"[_\[](\d+)\]?(?=\.|$)")


def normal_module(path: str) -> str:
    """Return a module's path without wrappers, with one spelling of numbered layers.

    Example:
        >>> from isobit.comparing.dumps.align import normal_module
        >>> normal_module("module._orig_mod.model.layers.3.mlp")
        'model.layer.3.mlp'
        >>> normal_module("model.layer_3.mlp") == normal_module("model.layers[3].mlp")
        True
    """
    parts = _NUMBER_AFTER.sub(r".\1", path.replace("/", ".")).split(".")
    parts = [part for part in parts if part and part not in _WRAPPERS]
    for at, part in enumerate(parts[:-1]):
        if parts[at + 1].isdigit() and len(part) > 1:
            parts[at] = part.removesuffix("s")
    return ".".join(parts).lower()


def normal_operator(name: str) -> str:
    """Return an operator's name without overload, in-place mark and spelling of its namespace.

    Example:
        >>> from isobit.comparing.dumps.align import normal_operator
        >>> normal_operator("aten::add_.Tensor"), normal_operator("torch.ops.aten.add.Tensor")
        ('aten::add', 'aten::add')
    """
    name = without_address(name).removeprefix("torch.ops.")
    found = re.fullmatch(r"(\w+)(?:::|\.)(\w+?)_?(?:\.\w+)?", name)
    if found and ("::" in name or found[1] in ("aten", "prims", "prim")):
        return f"{found[1]}::{found[2]}"
    return name


def without_address(name: str) -> str:
    """Remove memory addresses, which differ from run to run."""
    return _ADDRESS.sub("", name)


def shared_root(paths: Iterable[str]) -> str:
    """Return the first part that all non-empty paths share and that is no number, or nothing."""
    roots = {path.partition(".")[0] for path in paths if path}
    root = roots.pop() if len(roots) == 1 else ""
    return "" if root.isdigit() else root


def without_root(path: str, root: str) -> str:
    """Remove the shared root of a path."""
    return path.removeprefix(root).removeprefix(".") if root else path


# Align two sequences by the fewest insertions and deletions (Myers' algorithm).
#
# [Note: Why not difflib]
# `difflib` takes the longest common run first. Layers repeat, so the longest run of two logs often
# pairs one layer with another, and all that lies on the wrong side of it has no partner any more.
# The fewest edits keep layers in order.

MOST_EDITS = (
    1000  # of one search; its cost grows with the square. A longer path is made of several.
)


def matching(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return pairs of indices of equal items, increasing in both sequences.

    Args:
        a: A sequence.
        b: A sequence.

    Returns:
        As many pairs as possible if the sequences differ by up to `MOST_EDITS` edits; otherwise nearly as many.

    Example:
        >>> from isobit.comparing.dumps.align import matching
        >>> matching("abcab", "acab")
        [(0, 0), (2, 1), (3, 2), (4, 3)]
    """
    codes: dict[Hashable, int] = {}
    left = [codes.setdefault(item, len(codes)) for item in a]
    right = [codes.setdefault(item, len(codes)) for item in b]
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        trace, end = _search(left, right, i, j)
        path = _walk_back(trace, *end)
        pairs += [(i + x, j + y) for x, y in path]
        i, j = i + end[0], j + end[1]
    return pairs


def _search(
    a: list[int], b: list[int], i: int, j: int
) -> tuple[list[dict[int, int]], tuple[int, int]]:
    """Return the furthest points by number of edits, and where the search ended, from (i, j)."""
    n, m = len(a) - i, len(b) - j
    furthest: dict[int, int] = {1: 0}  # diagonal x - y -> x
    trace: list[dict[int, int]] = []
    for edits in range(MOST_EDITS + 1):
        row: dict[int, int] = {}
        for k in range(-edits, edits + 1, 2):
            down, across = furthest.get(k + 1, -1), furthest.get(k - 1, -1) + 1
            x = max(down, across if k - 1 in furthest else -1)
            y = x - k
            if x < 0 or x > n or y > m:
                continue
            while x < n and y < m and a[i + x] == b[j + y]:
                x, y = x + 1, y + 1
            row[k] = x
            if x == n and y == m:
                trace.append(row)
                return trace, (x, y)
        trace.append(row)
        furthest = row
    k = max(row, key=lambda at: 2 * row[at] - at)
    return trace, (row[k], row[k] - k)


def _walk_back(trace: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """Return the pairs on the path to (x, y), first to last."""
    pairs = []
    for edits in range(len(trace) - 1, -1, -1):
        if edits == 0:
            begin_x, begin_y, entered = 0, 0, 0
        else:
            before, k = trace[edits - 1], x - y
            came_down = k + 1 in before and before[k + 1] >= before.get(k - 1, -2) + 1
            begin_x = before[k + 1] if came_down else before[k - 1]
            begin_y = begin_x - (k + 1 if came_down else k - 1)
            entered = begin_x if came_down else begin_x + 1
        while x > entered:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = begin_x, begin_y
    return pairs[::-1]


_STEPS = {"forward_pass_id": "step", "curr_step": "step"}  # older names of a tag
_COUNTERS = ("step", "call")  # tags whose numbers may be shifted between two runs

Key = Callable[[Entry], Hashable]


@dataclass(frozen=True)
class Pair:
    """Two entries of one place, and how they were aligned."""

    left: Entry
    right: Entry
    alignment: str


def align(left: Sequence[Entry], right: Sequence[Entry]) -> tuple[Pair, ...]:
    """Pair the entries of two dumps, in the order of the left one.

    Args:
        left: Entries in order; `position` is their index.
        right: The same for the other dump.

    Returns:
        The pairs. Each entry is in one pair at most.

    Example:
        >>> from isobit.comparing.dumps.align import align
        >>> from isobit.comparing.dumps.records import Entry
        >>> (pair,) = align([Entry("model.layers.0", "aten::mm")], [Entry("model.layer_0", "aten::mm")])
        >>> pair.alignment
        'names'
    """
    return _Alignment(left, right).run()


class _Alignment:
    def __init__(self, left: Sequence[Entry], right: Sequence[Entry]) -> None:
        self.left, self.right = left, right
        self.partner: dict[int, tuple[int, str]] = {}  # left position -> right position and way
        self.taken: set[int] = set()
        self.names: list[list[str]] = []
        modules = {e.module: normal_module(e.module) for e in (*left, *right)}
        roots = [shared_root(modules[e.module] for e in side) for side in (left, right)]
        if roots[0] == roots[1]:
            roots = ["", ""]
        self.names = [
            [without_root(modules[e.module], root) for e in side]
            for side, root in ((left, roots[0]), (right, roots[1]))
        ]

    def run(self) -> tuple[Pair, ...]:
        self._by_group(EXACT, lambda side, at: _place(self._side(side)[at]))
        self._by_group(NAMES, self._normal_place)
        for way, key in (
            (SEQUENCE, self._shape_key),
            (SEQUENCE, self._name_key),
            (RENAMED, self._leaf_key),
            (RENAMED, self._operator_key),
        ):
            for lefts, rights in list(self._gaps()):
                self._by_sequence(way, lefts, rights, key)
        return tuple(
            Pair(self.left[at], self.right[self.partner[at][0]], self.partner[at][1])
            for at in sorted(self.partner)
        )

    def _side(self, side: int) -> Sequence[Entry]:
        return (self.left, self.right)[side]

    def _by_group(self, way: str, key: Callable[[int, int], Hashable | None]) -> None:
        """Pair groups of equal keys that have as many members on both sides."""
        groups: list[dict[Hashable, list[int]]] = [defaultdict(list), defaultdict(list)]
        for side, taken in ((0, self.partner.keys()), (1, self.taken)):
            for at in range(len(self._side(side))):
                if at not in taken and (found := key(side, at)) is not None:
                    groups[side][found].append(at)
        for found, lefts in groups[0].items():
            rights = groups[1].get(found, [])
            if len(lefts) == len(rights):
                for a, b in zip(lefts, rights, strict=True):
                    self._pair(a, b, way)

    def _pair(self, a: int, b: int, way: str) -> None:
        self.partner[a] = (b, way)
        self.taken.add(b)

    def _normal_place(self, side: int, at: int) -> Hashable | None:
        entry = self._side(side)[at]
        if not entry.module:
            return None
        tags = tuple(sorted((_STEPS.get(key, key), value) for key, value in entry.tags))
        return (self.names[side][at], normal_operator(entry.operator), tags)

    def _name_key(self, side: int, at: int) -> Hashable:
        entry = self._side(side)[at]
        return (self.names[side][at], normal_operator(entry.operator), _kept_tags(entry))

    def _shape_key(self, side: int, at: int) -> Hashable:
        return (self._name_key(side, at), self._side(side)[at].outputs)

    def _leaf_key(self, side: int, at: int) -> Hashable:
        entry = self._side(side)[at]
        leaf = self.names[side][at].rpartition(".")[2]
        return (leaf, normal_operator(entry.operator), _kept_tags(entry), _ranks(entry))

    def _operator_key(self, side: int, at: int) -> Hashable:
        """Return a key without the module; a tensor with a name has nothing else, so it gets its own."""
        entry = self._side(side)[at]
        if not entry.operator:
            return (side, at)
        return (normal_operator(entry.operator), _kept_tags(entry), _ranks(entry))

    def _gaps(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield what is not paired between each two pairs that follow each other on both sides."""
        anchors = _increasing([(a, b) for a, (b, _) in sorted(self.partner.items())])
        edges = [(-1, -1), *anchors, (len(self.left), len(self.right))]
        for (a, b), (next_a, next_b) in pairwise(edges):
            lefts = [at for at in range(a + 1, next_a) if at not in self.partner]
            rights = [at for at in range(b + 1, next_b) if at not in self.taken]
            if lefts and rights:
                yield lefts, rights

    def _by_sequence(
        self, way: str, lefts: list[int], rights: list[int], key: Callable[[int, int], Hashable]
    ) -> None:
        names = [
            [self._name_key(side, at) for at in part] for side, part in ((0, lefts), (1, rights))
        ]
        if names[0] == names[1]:  # the same calls in one order, whatever their shapes
            key = self._name_key
        a, b = [key(0, at) for at in lefts], [key(1, at) for at in rights]
        common = sum((Counter(a) & Counter(b)).values())
        if 2 * common < min(len(a), len(b)) and key == self._shape_key:
            return  # other sizes throughout, such as another batch: names alone say more
        for i, j in matching(a, b) if common else ():
            self._pair(lefts[i], rights[j], way)


def _place(entry: Entry) -> Hashable | None:
    return (entry.module, entry.operator, entry.tags) if entry.module else None


def _kept_tags(entry: Entry) -> Hashable:
    return tuple(sorted(tag for tag in entry.tags if _STEPS.get(tag[0], tag[0]) not in _COUNTERS))


def _ranks(entry: Entry) -> Hashable:
    """Return dtypes and numbers of axes: sizes differ between batch sizes."""
    return tuple(
        (out.dtype, None if out.shape is None else len(out.shape)) for out in entry.outputs
    )


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest part of pairs, sorted by the first number, in which the second also increases."""
    ends: list[int] = []  # the smallest last number of a chain, by its length
    at_end: list[int] = []
    before: list[int] = []
    for at, (_, b) in enumerate(pairs):
        length = bisect_left(ends, b)
        before.append(at_end[length - 1] if length else -1)
        if length == len(ends):
            ends.append(b)
            at_end.append(at)
        else:
            ends[length], at_end[length] = b, at
    chain = []
    at = at_end[-1] if at_end else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]
