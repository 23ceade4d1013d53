"""Where the terms of one element of a result are; see [Note: how terms are found] in sum_finder.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True)
class Addend:
    """An input of which the element adds one entry to the sum, such as a bias.

    Attributes:
        at: its flat position.
        entry: the entry.
        places: per dimension of the input, the dimension of the result that it moves along.
    """

    at: int
    entry: Index
    places: dict[int, int]


@dataclass(frozen=True)
class FoundSum:
    """The terms of one element of a result.

    Attributes:
        carrier: the flat position of the input that holds the terms.
        output: the index of the result among the floating-point results.
        element: the element that is read.
        first: one entry of the carrier that it adds.
        members: per summed dimension of the carrier, the indices that are added.
        places: per other dimension of the carrier, the dimension of the result that it moves along.
        whole: whether all entries of the summed dimensions are added.
        gain: the element's value if one term is 1.
        factor: flat position and dimension of the other factor of each term, if products are summed.
        addend: an input of which one entry is added too.
    """

    carrier: int
    output: int
    element: Index
    first: Index
    members: dict[int, Sequence[int]]
    places: dict[int, int]
    whole: bool
    gain: float
    factor: tuple[int, int] | None = None
    addend: Addend | None = None

    @property
    def n(self) -> int:
        """The number of terms."""
        return math.prod(len(indices) for indices in self.members.values())
