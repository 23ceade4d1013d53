"""Measure how far each element of a result moves when the inputs are rounded, and on how many inputs it depends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor]
# The share of inputs that each draw changes. Full draws measure how far an element moves; sparse ones leave an element
# as it is unless one of its inputs was drawn, which shows how many it has. An element of two inputs that nearly cancel
# does not move in a draw that changes both alike, which is every second one: FULL such draws miss it once in 2^16.
FULL = 16
SHARES = (1.0, 1.0, 1.0, 1.0, 0.5, 0.125, 2.0**-6, 2.0**-9, *[1.0] * (FULL - 4))
CHANCE = 0.1  # of what a full draw moves: above it, two equal calls differ by more than fp64's rounding explains
MOST = 0.98  # a share of changed elements above which a draw says only that there are many inputs


def sensitivity(
    run: Callable[[Change], Tensor], result: Tensor, rounding: float
) -> tuple[Tensor, int]:
    """Return how far each element moves per relative change of its inputs, and how many inputs an element has.

    Args:
        run: Computes the result in fp64 with every floating input changed by a function.
        result: The result for inputs as they are.
        rounding: The relative size of a change.

    Returns:
        The root of Σ (a_i x_i)² for derivatives a_i, and the estimated number of inputs x_i. Zeros and 1 where two
        calls with the same inputs differ about as much: then rounding of inputs explains nothing.
    """
    squares = torch.zeros_like(result)
    inputs = 1.0
    by_chance = finite(run(lambda value: value) - result).norm()
    for number, share in enumerate(SHARES):
        generator = torch.Generator().manual_seed(number)
        moved = run(lambda value, s=share, g=generator: changed(value, s, rounding, g))  # type: ignore[misc]
        apart = finite(moved - result)
        if not number and by_chance > CHANCE * apart.norm():
            return squares, 1
        squares += apart * apart
        inputs = max(inputs, inputs_by(float((apart != 0).double().mean()), share))
    return (squares / sum(SHARES)).sqrt() / rounding, math.ceil(inputs)


def finite(values: Tensor) -> Tensor:
    """Return values with zeros where they are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def changed(value: Tensor, share: float, rounding: float, generator: torch.Generator) -> Tensor:
    """Change a share of elements by ± one rounding."""
    drawn = torch.rand(value.shape, generator=generator).to(value.device)
    sign = torch.where(drawn < share / 2, 1.0, -1.0) * (drawn < share)
    return value * (1 + rounding * sign.to(value.dtype))


def inputs_by(moved: float, share: float) -> float:
    """Return how many inputs an element has, if a draw of this share of inputs moved this share of elements."""
    if share == 1.0 or moved == 0.0:
        return 1.0
    return math.log1p(-min(moved, MOST)) / math.log1p(-share)
