"""The check that revealing works on this machine: sums of known order, and sums that are not trees.

`certify` runs it before every certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from isobit.errors import EngineError, RevealError
from isobit.order.addition import Branch, Step, digest, steps_of
from isobit.order.evaluate import add_fp32
from isobit.reveal.target import FP32, Terms
from isobit.reveal.tree import reveal

PLANTED_TERMS = 33


class PlainSum:
    """A target that sums Python numbers by a given function."""

    kind, scale, output_bits, scope, unlike, storage = "sum", FP32, 24, "", 0, ""

    def __init__(self, name: str, n: int, function: Callable[[Sequence[float]], float]) -> None:
        """Take the name, the number of terms, and the function that sums them."""
        self.name, self.n, self.function = name, n, function

    def sums(self, batch: Sequence[Terms]) -> list[float]:
        """Return the sum of each probe."""
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
        """Return the sum; there is only one place."""
        return [self.function(values)]

    def replay_batch(
        self, batch: Sequence[Sequence[float]], factors: Sequence[float]
    ) -> list[list[float]]:
        """Return the sum of each vector."""
        return [[self.function(list(values))] for values in batch]


def plant_tree(branch: Branch, n: int) -> PlainSum:
    """Return a target that adds in fp32 in this order."""
    steps = steps_of(branch)
    return PlainSum("planted tree", n, lambda values: add_by_steps(steps, values))


def add_by_steps(steps: Sequence[Step], values: Sequence[float]) -> float:
    """Add two at a time in fp32, step by step."""
    sums: list[float] = []
    for left, right in steps:
        a = values[~left] if left < 0 else sums[left]
        sums.append(add_fp32(a, values[~right] if right < 0 else sums[right]))
    return sums[-1] if sums else values[0]


def plant_compensated(n: int) -> PlainSum:
    """Return Kahan's sum in fp32: its probes look like those of a chain, its values differ."""
    return PlainSum("planted compensated sum", n, add_compensated)


def add_compensated(values: Sequence[float]) -> float:
    """Subtract the error of each addition from the next term."""
    total, error = values[0], 0.0
    for value in values[1:]:
        corrected = add_fp32(value, -error)
        grown = add_fp32(total, corrected)
        error = add_fp32(add_fp32(grown, -total), -corrected)
        total = grown
    return total


def plant_corrected(n: int) -> PlainSum:
    """Return Sum2 of Ogita, Rump and Oishi in fp32: its probes look like one exact addition of all terms."""
    return PlainSum("planted compensated sum with a correction at the end", n, add_corrected)


def add_corrected(values: Sequence[float]) -> float:
    """Sum the errors of a chain separately, and add them at the end."""
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
    """Draw a binary tree over n terms."""
    parts: list[Branch] = list(range(n))
    while len(parts) > 1:
        left = parts.pop(random.randrange(len(parts)))
        right = parts.pop(random.randrange(len(parts)))
        parts.append((left, right))
    return parts[0]


def check_revealing() -> None:
    """Check that a known order is found exactly, and that compensated sums are rejected.

    Raises:
        EngineError: Revealing does not work on this machine.
    """
    branch = draw_branch(Random(PLANTED_TERMS), PLANTED_TERMS)
    tree = reveal(plant_tree(branch, PLANTED_TERMS))
    if tree.order_digest != digest(branch) or not tree.replayed:
        raise EngineError(
            expected=f"the planted order {digest(branch)[:8]}",
            received=f"{tree.order_digest[:8]}, replayed {tree.replayed} times",
            remedy="revealing does not work on this machine; trust no certificate, and report this",
        )
    for planted in (plant_compensated(PLANTED_TERMS), plant_corrected(PLANTED_TERMS)):
        try:
            reveal(planted)
        except RevealError:
            continue
        raise EngineError(
            expected="a planted compensated sum to be rejected",
            received=f"an order for {planted.name}",
            remedy="replaying does not work on this machine; trust no certificate, and report this",
        )
