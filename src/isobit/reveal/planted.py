"""Targets whose order is known: what a check of the revealing itself is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from isobit.order.addition import Branch, Step, steps_of
from isobit.order.evaluate import add_fp32
from isobit.reveal.target import FP32, Terms


class Planted:
    """A sum of plain numbers by a given function."""

    kind, scale, output_bits, scope, unlike, storage = "sum", FP32, 24, "", 0, ""

    def __init__(self, name: str, n: int, function: Callable[[Sequence[float]], float]) -> None:
        self.name, self.n, self.function = name, n, function

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """One by one."""
        found = []
        for probe in batch:
            values = [0.0] * self.n
            for index in probe.over:
                values[index] = probe.fill
            for index, value in zip(probe.indices, probe.values, strict=True):
                values[index] = value
            found.append(self.function(values))
        return found

    def replay(self, values: Sequence[float], factors: Sequence[float]) -> list[float]:
        """The one place that there is."""
        return [self.function(values)]

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> list[list[float]]:
        """One by one."""
        return [[self.function(list(values))] for values in batch]


def plant_tree(branch: Branch, n: int) -> Planted:
    """fp32 additions in this order."""
    steps = steps_of(branch)
    return Planted("planted tree", n, lambda values: add_by_steps(steps, values))


def add_by_steps(steps: Sequence[Step], values: Sequence[float]) -> float:
    """fp32 additions of two, step by step."""
    sums: list[float] = []
    for left, right in steps:
        sums.append(
            add_fp32(
                values[~left] if left < 0 else sums[left],
                values[~right] if right < 0 else sums[right],
            )
        )
    return sums[-1] if sums else values[0]


def plant_compensated(n: int) -> Planted:
    """Kahan's sum in fp32: its probes look like a chain's, its values are not."""
    return Planted("planted compensated sum", n, add_compensated)


def add_compensated(values: Sequence[float]) -> float:
    """Each addition's error is taken off the next term."""
    total, error = values[0], 0.0
    for value in values[1:]:
        corrected = add_fp32(value, -error)
        grown = add_fp32(total, corrected)
        error = add_fp32(add_fp32(grown, -total), -corrected)
        total = grown
    return total


def plant_corrected(n: int) -> Planted:
    """Sum2 of Ogita, Rump and Oishi in fp32: its probes look like one exact addition of all terms."""
    return Planted("planted compensated sum with a correction at the end", n, add_corrected)


def add_corrected(values: Sequence[float]) -> float:
    """The errors of a chain are summed beside it, and added at the end."""
    total = errors = 0.0
    for value in values:
        grown = add_fp32(total, value)
        there = add_fp32(grown, -total)
        errors = add_fp32(
            errors, add_fp32(add_fp32(total, -add_fp32(grown, -there)), add_fp32(value, -there))
        )
        total = grown
    return add_fp32(total, errors)


def draw_branch(random: Random, n: int) -> Branch:
    """Any binary tree over n terms."""
    parts: list[Branch] = list(range(n))
    while len(parts) > 1:
        left = parts.pop(random.randrange(len(parts)))
        right = parts.pop(random.randrange(len(parts)))
        parts.append((left, right))
    return parts[0]
