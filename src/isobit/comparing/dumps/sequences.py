"""Align two sequences by the fewest insertions and deletions (Myers' algorithm).

[Note: Why not difflib]
`difflib` takes the longest common run first. Layers repeat, so the longest run of two logs often pairs one layer with
another, and all that lies on the wrong side of it has no partner any more. The fewest edits keep layers in order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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
        >>> from isobit.comparing.dumps.sequences import matching
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
