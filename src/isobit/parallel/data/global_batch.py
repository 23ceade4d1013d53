"""`GlobalBatch`: which samples of the global batch each rank's micro-batch has."""

from __future__ import annotations

from dataclasses import dataclass

from isobit.errors import ArgumentError, CutError
from isobit.foundation.renaming import accepts_old, keeps_old_attribute
from isobit.ops.share import Share
from isobit.order.samples import segment_size
from isobit.order.tree import Node

ORDERS = ("rank", "micro")


@keeps_old_attribute("of", "total")
@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, divided over ranks and micro-batches.

    Every share (one micro-batch on one rank) is a run of consecutive samples that is one subtree of
    the tree along which gradients are summed. So ranks × micro-batches must be a power of two that
    divides the number of segments of that tree.

    Args:
        total: The number of samples in the global batch.
        ranks: The number of data-parallel ranks.
        micro_batches: The number of micro-batches per rank and step.
        order: "rank": each rank has consecutive samples, divided over its micro-batches. "micro":
            each micro-batch has consecutive samples, divided over the ranks, as FSDP2 needs.

    Raises:
        ArgumentError: A number is below one, or the order is unknown.
        CutError: The samples cannot be divided into so many shares.

    Example:
        >>> batch = GlobalBatch(total=8, ranks=2, micro_batches=2)
        >>> [list(batch.samples(rank, micro)) for rank in (0, 1) for micro in (0, 1)]
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> list(GlobalBatch(total=8, ranks=2, micro_batches=2, order="micro").samples(0, 1))
        [4, 5]
    """

    total: int
    ranks: int = 1
    micro_batches: int = 1
    order: str = "rank"

    def __post_init__(self) -> None:
        """Check that every share is one subtree."""
        if self.total < 1 or self.ranks < 1 or self.micro_batches < 1:
            raise ArgumentError(
                expected="one sample, rank and micro-batch or more",
                received=f"{self.total} samples, {self.ranks} ranks, "
                f"{self.micro_batches} micro-batches",
                remedy="pass numbers from one on",
            )
        if self.order not in ORDERS:
            raise ArgumentError(
                expected="order 'rank' or 'micro'",
                received=f"{self.order!r}",
                remedy="pass 'rank', or 'micro' for fully_shard",
            )
        segments = self.total // segment_size(self.total)
        if segments % self.shares:
            possible = [1 << i for i in range(segments.bit_length())]
            raise CutError(
                expected=f"ranks × micro-batches that divide {segments}, the number of segments of "
                f"{self.total} samples",
                received=f"{self.ranks} ranks × {self.micro_batches} micro-batches = {self.shares}",
                remedy=f"use one of {possible} shares, or another global batch",
            )

    @property
    def shares(self) -> int:
        """The number of shares on all ranks together."""
        return self.ranks * self.micro_batches

    @property
    def size(self) -> int:
        """The number of samples in one share."""
        return self.total // self.shares

    def share(self, rank: int, micro_batch: int = 0) -> Share:
        """Return the share of a rank's micro-batch.

        Raises:
            ArgumentError: There is no such rank or micro-batch.
        """
        self._check_index("rank", rank, self.ranks)
        self._check_index("micro-batch", micro_batch, self.micro_batches)
        at = (
            rank * self.micro_batches + micro_batch
            if self.order == "rank"
            else micro_batch * self.ranks + rank
        )
        return Share(at * self.size, self.total, self.size)

    def samples(self, rank: int, micro_batch: int = 0) -> range:
        """Return the indices in the global batch of the samples of a rank's micro-batch."""
        first = self.share(rank, micro_batch).first
        return range(first, first + self.size)

    def node(self, rank: int, micro_batch: int = 0) -> Node:
        """Return the subtree of the sample tree that a rank's micro-batch sums."""
        segments = self.total // segment_size(self.total)
        level = (segments // self.shares).bit_length() - 1
        return Node(level, self.share(rank, micro_batch).first // self.size)

    def _check_index(self, what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ArgumentError(
                expected=f"a {what} from 0 to {count - 1}",
                received=f"{index}",
                remedy=f"number each {what} from zero",
            )


GlobalBatch.__init__ = accepts_old(of="total")(GlobalBatch.__init__)  # type: ignore[method-assign]
