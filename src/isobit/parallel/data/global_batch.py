"""`GlobalBatch`: which samples of the global batch each rank's micro-batch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch.utils.data import Sampler

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


# `GlobalBatchSampler`: a `batch_sampler` for DataLoader that is the same run at every layout.


class GlobalBatchSampler(Sampler[list[int]]):
    """Yield this rank's micro-batches of every global batch, as lists of dataset indices.

    The order of the dataset depends only on seed and epoch. The state counts global batches, so a
    run can be resumed with other numbers of ranks and micro-batches.

    Args:
        length: The number of samples in the dataset.
        batch: How each global batch is divided.
        rank: This process's data-parallel rank.
        seed: The seed of the shuffle.
        shuffle: Whether to shuffle each epoch; otherwise samples come in the dataset's order.
        drop_last: Whether to leave out samples that do not fill a global batch.

    Raises:
        ArgumentError: The samples do not fill whole global batches, or there is no such rank.

    Example:
        >>> from isobit.parallel import GlobalBatch, GlobalBatchSampler
        >>> batch = GlobalBatch(total=4, ranks=2)
        >>> list(GlobalBatchSampler(8, batch, rank=1, shuffle=False))
        [[2, 3], [6, 7]]
    """

    def __init__(
        self,
        length: int,
        batch: GlobalBatch,
        rank: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        """Check that the samples fill whole global batches."""
        batch.share(rank)
        if length < batch.total or (length % batch.total and not drop_last):
            raise ArgumentError(
                expected=f"samples for whole global batches of {batch.total}",
                received=f"{length} samples, {length % batch.total} over",
                remedy="pass drop_last=True to leave out the rest"
                if length >= batch.total
                else "use a smaller global batch",
            )
        self.length, self.batch, self.rank = length, batch, rank
        self.seed, self.shuffle = seed, shuffle
        self.epoch = self._done = self._start = 0

    @property
    def batches(self) -> int:
        """The number of global batches per epoch."""
        return self.length // self.batch.total

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank per epoch."""
        return self.batches * self.batch.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the dataset indices of each micro-batch of this rank."""
        order = self.global_order()
        # A loaded state applies to one pass; a later pass starts at the first batch.
        self._done, self._start = self._start, 0
        for at in range(self._done, self.batches):
            for micro_batch in range(self.batch.micro_batches):
                run = self.batch.samples(self.rank, micro_batch)
                if micro_batch + 1 == self.batch.micro_batches:
                    self._done = at + 1
                yield order[at * self.batch.total + run.start : at * self.batch.total + run.stop]

    def global_order(self) -> list[int]:
        """Return the dataset indices in the order of this epoch."""
        if not self.shuffle:
            return list(range(self.length))
        drawn = blake3(f"{self.seed}, {self.epoch}".encode()).digest(length=8)
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return torch.randperm(self.length, generator=generator).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Start another epoch; an epoch whose state was loaded continues where it was."""
        if epoch != self.epoch:
            self.epoch, self._done, self._start = epoch, 0, 0

    def state_dict(self, trained: int | None = None) -> dict[str, Any]:
        """Return the state to resume from.

        Args:
            trained: The number of global batches trained in this epoch. Pass it if the loader
                prefetches; the default is the number of batches that were yielded.
        """
        done = self._done if trained is None else trained
        return {**self._identity(), "epoch": self.epoch, "done": done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches done; ranks and micro-batches may differ from the saved ones.

        Raises:
            ArgumentError: The state has another dataset length, global batch, seed or shuffle.
        """
        known = {name: state.get(name) for name in self._identity()}
        if known != self._identity() or not 0 <= state.get("done", -1) <= self.batches:
            raise ArgumentError(
                expected=f"a state of {self._identity()}, of at most {self.batches} batches",
                received=f"{state}",
                remedy="keep dataset, global batch, seed and shuffle; ranks and micro-batches may "
                "change",
            )
        self.epoch, self._done = int(state["epoch"]), int(state["done"])
        self._start = self._done

    def _identity(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "of": self.batch.total,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
