"""Cut a feature axis over ranks: a share is a run of whole segments of the plan."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.errors import CutError
from isobit.order.plan import FeaturePlan
from isobit.order.tree import Node, find_roots


@dataclass(frozen=True)
class Cut:
    """One of several equal shares of a feature axis, such as the K of a linear layer that is cut over ranks.

    Args:
        extent: The length of the whole axis.
        parts: The number of shares; a divisor of the number of segments.
        index: Which share, from 0.

    Raises:
        CutError: If the plan of this extent cannot be cut so.

    Example:
        >>> cut = isobit.order.Cut(extent=4096, parts=4, index=1)
        >>> cut.start, cut.length
        (1024, 1024)
    """

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
        """The first element of the share in the whole axis."""
        return self.index * self.length

    @property
    def length(self) -> int:
        """The number of elements of the share."""
        return self.extent // self.parts

    @property
    def roots(self) -> tuple[Node, ...]:
        """The subtree that this share sums."""
        share = FeaturePlan(self.extent).count // self.parts
        return find_roots(self.index * share, (self.index + 1) * share)
