"""The global batch, and which run of its samples each rank's micro-batch holds."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.ops.share import Share
from isobit.order.plan import SAMPLE_CAP, SAMPLE_UNIT, count_segments
from isobit.order.tree import Node


@dataclass(frozen=True)
class GlobalBatch:
    of: int
    ranks: int = 1
    micro_batches: int = 1
    order: str = "rank"

    def __post_init__(self) -> None:
        count = count_segments(self.of, SAMPLE_UNIT, SAMPLE_CAP)
        if self.ranks * self.micro_batches < 1 or count % (self.ranks * self.micro_batches):
            raise CutError(
                expected=f"ranks times micro-batches that divide {count}, the segments of {self.of} samples",
                received=f"{self.ranks} ranks of {self.micro_batches} micro-batches",
                remedy="choose powers of two",
            )

    @property
    def size(self) -> int:
        return self.of // (self.ranks * self.micro_batches)

    def index(self, rank: int, micro: int) -> int:
        if self.order == "rank":
            return rank * self.micro_batches + micro
        return micro * self.ranks + rank

    def share(self, rank: int, micro: int) -> Share:
        return Share(self.index(rank, micro) * self.size, self.of)

    def node(self, rank: int, micro: int) -> Node:
        count = count_segments(self.of, SAMPLE_UNIT, SAMPLE_CAP) // (self.ranks * self.micro_batches)
        return Node(count.bit_length() - 1, self.index(rank, micro))
