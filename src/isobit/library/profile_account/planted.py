"""Wrong accountants: each says where the nanoseconds of a window went, and is wrong in one way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isobit.profiling.account import UNRECORDED, Interval, covered, union

Layers = Sequence[tuple[str, Sequence[Interval]]]
Parts = dict[str, int]


def subtract(intervals: Iterable[Interval], taken: set[int]) -> set[int]:
    """Return the cells of intervals that are not taken."""
    return {at for a, b in intervals for at in range(a, b)} - taken


def by_cells(layers: Layers, start: int, end: int, *, window: set[int] | None = None) -> Parts:
    """Account by sets of cells: right, and what the planted ones vary."""
    inside = set(range(start, end))
    taken: set[int] = set()
    found: Parts = {}
    for name, slices in layers:
        cells = subtract(slices, taken) & (inside if window is None else window)
        taken |= cells
        if cells:
            found[name] = len(cells)
    rest = len(inside - taken)
    return found | ({UNRECORDED: rest} if rest else {})


def sums_durations(layers: Layers, start: int, end: int) -> Parts:
    """Count two kernels that run at once twice: the sum of durations as wall time."""
    found = {}
    for name, slices in layers:
        found[name] = sum(max(0, min(b, end) - max(a, start)) for a, b in slices)
    found[UNRECORDED] = end - start - sum(found.values())
    return {name: ns for name, ns in found.items() if ns}


def overlap_in_both(layers: Layers, start: int, end: int) -> Parts:
    """Count hidden communication as communication and as compute."""
    found = {name: covered(union(slices), start, end) for name, slices in layers}
    found[UNRECORDED] = end - start - sum(found.values())
    return {name: ns for name, ns in found.items() if ns}


def last_layer_wins(layers: Layers, start: int, end: int) -> Parts:
    """Let what the host does hide work of the device."""
    return by_cells(list(reversed(layers)), start, end)


def waiting_first(layers: Layers, start: int, end: int) -> Parts:
    """Count a host that waits for the device as a stall of the device."""
    return by_cells([*layers[-1:], *layers[:-1]], start, end)


def end_included(layers: Layers, start: int, end: int) -> Parts:
    """Count the nanosecond at which a slice has ended."""
    return by_cells([(name, [(a, b + 1) for a, b in s if b > a]) for name, s in layers], start, end)


def before_the_step(layers: Layers, start: int, end: int) -> Parts:
    """Count work from before the step."""
    return by_cells(layers, start, end, window=set(range(-100, end)))


def after_the_step(layers: Layers, start: int, end: int) -> Parts:
    """Count work from after the step."""
    return by_cells(layers, start, end, window=set(range(start, 200)))


def only_whole_slices(layers: Layers, start: int, end: int) -> Parts:
    """Leave out slices that cross an end of the step."""
    return by_cells(
        [(n, [(a, b) for a, b in s if start <= a and b <= end]) for n, s in layers], start, end
    )


def begun_in_the_step(layers: Layers, start: int, end: int) -> Parts:
    """Leave out slices that began before the step."""
    return by_cells([(n, [(a, b) for a, b in s if a >= start]) for n, s in layers], start, end)


def last_end_wins(layers: Layers, start: int, end: int) -> Parts:
    """Merge nested slices by the end of the later one."""
    changed = []
    for name, slices in layers:
        merged: list[Interval] = []
        for a, b in sorted(slices):
            if b <= a:
                continue
            if merged and a <= merged[-1][1]:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        changed.append((name, merged))
    return by_cells(changed, start, end)


def in_given_order(layers: Layers, start: int, end: int) -> Parts:
    """Merge without sorting: a slice that starts before the last one is lost."""
    changed = []
    for name, slices in layers:
        kept: list[Interval] = []
        last = -(10**9)
        for a, b in slices:
            if a >= last:
                kept.append((a, b))
                last = a
        changed.append((name, kept))
    return by_cells(changed, start, end)


def bridges_gaps(layers: Layers, start: int, end: int) -> Parts:
    """Merge slices that are one nanosecond apart."""
    changed = []
    for name, found in layers:
        starts = {a for a, _ in found}
        changed.append((name, [(a, b + (b + 1 in starts)) for a, b in found]))
    return by_cells(changed, start, end)


def idle_is_lost(layers: Layers, start: int, end: int) -> Parts:
    """Leave out time in which nothing was recorded."""
    found = by_cells(layers, start, end)
    found.pop(UNRECORDED, None)
    return found


def rounds_to_microseconds(layers: Layers, start: int, end: int) -> Parts:
    """Round times to a coarser clock."""
    return by_cells([(n, [(a // 2 * 2, b // 2 * 2) for a, b in s]) for n, s in layers], start, end)


def largest_slice_only(layers: Layers, start: int, end: int) -> Parts:
    """Count the longest slice of each cause."""
    return by_cells(
        [(n, [max(s, key=lambda i: i[1] - i[0])] if s else []) for n, s in layers], start, end
    )


def forgets_a_layer(layers: Layers, start: int, end: int) -> Parts:
    """Leave out the last cause."""
    return by_cells(layers[:-1], start, end) if len(layers) > 1 else by_cells(layers, start, end)
