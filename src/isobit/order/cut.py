"""Splits that the plan allows: a share of an extent is a run of whole segments."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.errors import CutError
from isobit.order.plan import FeaturePlan
from isobit.order.tree import Node, find_roots


@dataclass(frozen=True)
class Cut:
    """The `index`-th of `parts` equal shares of a feature axis of the whole problem."""

    extent: int
    parts: int
    index: int

    def __post_init__(self) -> None:
        count = FeaturePlan(self.extent).count
        if self.parts < 1 or count % self.parts:
            raise CutError(
                expected=f"a number of parts that divides {count}, the segments of extent {self.extent}",
                received=f"{self.parts} parts",
                remedy=f"use one of {[1 << i for i in range(count.bit_length())]} parts",
            )
        if not 0 <= self.index < self.parts:
            raise CutError(
                expected=f"an index from 0 to {self.parts - 1}",
                received=f"index {self.index}",
                remedy="number the shares from zero",
            )

    @property
    def start(self) -> int:
        """The first element of the share."""
        return self.index * self.length

    @property
    def length(self) -> int:
        """Elements of the share."""
        return self.extent // self.parts

    @property
    def roots(self) -> tuple[Node, ...]:
        """The one subtree that this share sums."""
        share = FeaturePlan(self.extent).count // self.parts
        return find_roots(self.index * share, (self.index + 1) * share)
