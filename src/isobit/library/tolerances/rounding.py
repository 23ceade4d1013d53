"""Values with the error that their roundings can have, to first order.

[Note: errors to first order]
A value carries its exact number and two bounds: its error is at most `wide` · u₃₂ + `narrow` · u₁₆, if products of
roundings are neglected. u₃₂ is the unit roundoff of fp32, u₁₆ that of the dtype in which a kernel stores; where that is
fp32, `narrow` is not counted, because every operation is rounded to fp32 already.

- A product, a sum of two and a quotient pass the errors of both on, and are rounded once to fp32.
- A sum of n terms, in any order, is rounded n − 1 times, each time by at most u₃₂ times the sum of the magnitudes.
- A function passes the error of its argument on by its slope, and is wrong by 2 ulp, which is at most 4 · u₃₂.
- `stored` is a value that is written in the inputs' dtype and read again.

The rules are those of Higham, Accuracy and Stability of Numerical Algorithms (2002), chapters 2 to 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FUNCTION = 4  # roundoffs of fp32 in the result of exp, log, erf or rsqrt


@dataclass(frozen=True)
class Rounded:
    """An exact value in fp64, and its error in roundoffs of fp32 and of the stored dtype."""

    value: Tensor
    wide: Tensor
    narrow: Tensor

    @staticmethod
    def exact(value: Tensor) -> Rounded:
        """Return a value without an error, such as an argument."""
        return Rounded(value, torch.zeros_like(value), torch.zeros_like(value))

    def stored(self) -> Rounded:
        """Round to the dtype of the inputs."""
        return Rounded(self.value, self.wide, self.narrow + self.value.abs())

    def each(self, move: Callable[[Tensor], Tensor]) -> Rounded:
        """Move numbers without computing: transpose, expand, gather."""
        return Rounded(move(self.value), move(self.wide), move(self.narrow))

    def weighted(self, factor: Tensor | float) -> Rounded:
        """Multiply value and errors by an exact number, without a rounding."""
        size = abs(factor) if isinstance(factor, float) else factor.abs()
        return Rounded(self.value * factor, self.wide * size, self.narrow * size)

    def __add__(self, other: Rounded) -> Rounded:
        value = self.value + other.value
        return Rounded(value, self.wide + other.wide + value.abs(), self.narrow + other.narrow)

    def __sub__(self, other: Rounded) -> Rounded:
        return self + other.weighted(-1.0)

    def __mul__(self, other: Rounded) -> Rounded:
        a, b = self.value.abs(), other.value.abs()
        wide = a * other.wide + b * self.wide + a * b
        return Rounded(self.value * other.value, wide, a * other.narrow + b * self.narrow)

    def __matmul__(self, other: Rounded) -> Rounded:
        a, b = self.value.abs(), other.value.abs()
        terms = self.value.shape[-1]
        wide = a @ other.wide + self.wide @ b + terms * (a @ b)
        return Rounded(self.value @ other.value, wide, a @ other.narrow + self.narrow @ b)

    def sum(self, axis: int) -> Rounded:
        """Add along an axis, which stays as one of length 1."""
        terms = self.value.shape[axis]

        def total(t: Tensor) -> Tensor:
            return t.sum(axis, keepdim=True)

        wide = total(self.wide) + (terms - 1) * total(self.value.abs())
        return Rounded(total(self.value), wide, total(self.narrow))

    def mean(self) -> Rounded:
        """Return the mean of the last axis, whose division is rounded."""
        return self.sum(-1).scaled(1 / self.value.shape[-1])

    def scaled(self, factor: float) -> Rounded:
        """Multiply by a constant."""
        return self * Rounded.exact(torch.tensor(factor, dtype=torch.float64))

    def through(self, value: Tensor, slope: Tensor) -> Rounded:
        """Return a function's value: the argument's error is multiplied by the slope."""
        size = slope.abs()
        wide = size * self.wide + FUNCTION * value.abs()
        return Rounded(value, wide, size * self.narrow)

    def exp(self) -> Rounded:
        """Return e^x; the argument is multiplied by log2(e) first, which is a rounding of it."""
        value = self.value.exp()
        return Rounded(self.value, self.wide + self.value.abs(), self.narrow).through(value, value)

    def log(self) -> Rounded:
        """Return the logarithm."""
        return self.through(self.value.log(), 1 / self.value)

    def rsqrt(self) -> Rounded:
        """Return 1/√x."""
        value = self.value.rsqrt()
        return self.through(value, value / (2 * self.value))

    def erf(self) -> Rounded:
        """Return the error function."""
        slope = 2 / torch.pi**0.5 * (-self.value.square()).exp()
        return self.through(torch.special.erf(self.value), slope)

    def reciprocal(self) -> Rounded:
        """Return 1/x, rounded once."""
        value = 1 / self.value
        size = value.square()
        return Rounded(value, size * self.wide + value.abs(), size * self.narrow)
