"""What an account of a window promises, on drawn slices, against an oracle that looks at each nanosecond.

A promise takes a `subject`, (layers, start, end) -> nanoseconds by cause, and the seed of a case.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from isobit.profiling.account import UNRECORDED, Interval

Layers = list[tuple[str, list[Interval]]]
Subject = Callable[[Layers, int, int], dict[str, int]]

NAMES = (
    "compute",
    "communication",
    "copies",
    "waiting",
)  # the first that covers a nanosecond has it


def drawn(seed: int) -> tuple[Layers, int, int]:
    """Draw slices of one to four causes, which overlap, nest, touch and are empty, and a window that cuts them."""
    draw = Random(seed)

    def interval() -> Interval:
        first, second = sorted((draw.randint(-8, 48), draw.randint(-8, 48)))
        return first, second

    layers = [
        (name, [interval() for _ in range(draw.randint(0, 4))])
        for name in NAMES[: draw.randint(1, len(NAMES))]
    ]
    start = draw.randint(0, 20)
    return layers, start, start + draw.randint(0, 24)


def oracle(layers: Layers, start: int, end: int) -> dict[str, int]:
    """Look at every nanosecond."""
    found: dict[str, int] = {}
    for at in range(start, end):
        covering = (name for name, slices in layers if any(a <= at < b for a, b in slices))
        cause = next(covering, UNRECORDED)
        found[cause] = found.get(cause, 0) + 1
    return found


def closes(subject: Subject, seed: int) -> bool:
    """No part is negative, and together they are the window."""
    layers, start, end = drawn(seed)
    parts = subject(layers, start, end)
    return min(parts.values(), default=0) >= 0 and sum(parts.values()) == end - start


def has_the_causes(subject: Subject, seed: int) -> bool:
    """Each nanosecond has the first cause that covers it."""
    layers, start, end = drawn(seed)
    return subject(layers, start, end) == oracle(layers, start, end)


def adds_up_over_windows(subject: Subject, seed: int) -> bool:
    """The parts of two adjacent windows add up to those of both."""
    layers, start, end = drawn(seed)
    middle = start + (end - start) // 3
    left, right = subject(layers, start, middle), subject(layers, middle, end)
    both = {name: left.get(name, 0) + right.get(name, 0) for name in {*left, *right}}
    return both == subject(layers, start, end)
