"""The global batch: which of its samples each rank's micro-batch holds, and a sampler that hands them out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch.utils.data import Sampler

from isobit.errors import ArgumentError, CutError
from isobit.ops.share import Share
from isobit.order.samples import segment_size
from isobit.order.tree import Node

ORDERS = ("rank", "micro")


@dataclass(frozen=True)
class GlobalBatch:
    """`of` samples over ranks and micro-batches: every share is one subtree of the samples' tree.

    Order "rank": a rank holds one run of the batch, cut into its micro-batches. Order "micro": a micro-batch is one
    run of the batch, cut over the ranks, as where each micro-batch is reduced over ranks before the next (FSDP2).
    """

    of: int
    ranks: int = 1
    micro_batches: int = 1
    order: str = "rank"

    def __post_init__(self) -> None:
        if self.of < 1 or self.ranks < 1 or self.micro_batches < 1:
            raise ArgumentError(
                expected="one sample, rank and micro-batch or more",
                received=f"{self.of} samples, {self.ranks} ranks, {self.micro_batches} micro-batches",
                remedy="count from one",
            )
        if self.order not in ORDERS:
            raise ArgumentError(
                expected="order 'rank' or 'micro'",
                received=f"{self.order!r}",
                remedy="say what a run is cut into last",
            )
        segments = self.of // segment_size(self.of)
        if segments % self.shares:
            raise CutError(
                expected=f"a number of shares that divides {segments}, the segments of {self.of} samples",
                received=f"{self.ranks} ranks × {self.micro_batches} micro-batches = {self.shares}",
                remedy=f"use one of {[1 << i for i in range(segments.bit_length())]} shares, or another global batch",
            )

    @property
    def shares(self) -> int:
        """Over all ranks."""
        return self.ranks * self.micro_batches

    @property
    def size(self) -> int:
        """Samples of one share."""
        return self.of // self.shares

    def share(self, rank: int, micro_batch: int = 0) -> Share:
        """Which `size` samples a rank's micro-batch holds."""
        self._check("rank", rank, self.ranks)
        self._check("micro-batch", micro_batch, self.micro_batches)
        at = (
            rank * self.micro_batches + micro_batch
            if self.order == "rank"
            else micro_batch * self.ranks + rank
        )
        return Share(at * self.size, self.of, self.size)

    def samples(self, rank: int, micro_batch: int = 0) -> range:
        """The same as places in the global batch."""
        first = self.share(rank, micro_batch).first
        return range(first, first + self.size)

    def node(self, rank: int, micro_batch: int = 0) -> Node:
        """The subtree of the samples' tree that a share sums."""
        segments = self.of // segment_size(self.of)
        return Node(
            (segments // self.shares).bit_length() - 1,
            self.share(rank, micro_batch).first // self.size,
        )

    def _check(self, what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ArgumentError(
                expected=f"a {what} from 0 to {count - 1}",
                received=f"{index}",
                remedy=f"number each {what} from zero",
            )


class GlobalBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for DataLoader: this rank's micro-batches of every global batch, as lists of indices.

    The global order depends on seed and epoch alone. A state counts global batches, so that a run may go on with
    other ranks and micro-batches.
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
        batch.share(rank)
        if length < batch.of or (length % batch.of and not drop_last):
            raise ArgumentError(
                expected=f"samples for whole global batches of {batch.of}",
                received=f"{length} samples, {length % batch.of} over",
                remedy="pass drop_last=True to leave out what is over"
                if length >= batch.of
                else "a smaller batch",
            )
        self.length, self.batch, self.rank = length, batch, rank
        self.seed, self.shuffle = seed, shuffle
        self.epoch = self._done = self._start = 0

    @property
    def batches(self) -> int:
        """Global batches of an epoch."""
        return self.length // self.batch.of

    def __len__(self) -> int:
        return self.batches * self.batch.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = self.global_order()
        # A state is taken up once; a later pass begins at the beginning.
        self._done, self._start = self._start, 0
        for at in range(self._done, self.batches):
            for micro_batch in range(self.batch.micro_batches):
                run = self.batch.samples(self.rank, micro_batch)
                if micro_batch + 1 == self.batch.micro_batches:
                    self._done = at + 1
                yield order[at * self.batch.of + run.start : at * self.batch.of + run.stop]

    def global_order(self) -> list[int]:
        """Indices of the dataset, as the epoch takes them."""
        if not self.shuffle:
            return list(range(self.length))
        drawn = blake3(f"{self.seed}, {self.epoch}".encode()).digest(length=8)
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return torch.randperm(self.length, generator=generator).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Another epoch begins at its first batch; the one that a state was loaded for goes on where it stood."""
        if epoch != self.epoch:
            self.epoch, self._done, self._start = epoch, 0, 0

    def state_dict(self, trained: int | None = None) -> dict[str, Any]:
        """How many global batches of the epoch are done; a loader that fetches ahead must say how many were trained."""
        return {
            **self._identity(),
            "epoch": self.epoch,
            "done": self._done if trained is None else trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the batches done, at this layout."""
        known = {name: state.get(name) for name in self._identity()}
        if known != self._identity() or not 0 <= state.get("done", -1) <= self.batches:
            raise ArgumentError(
                expected=f"a state of {self._identity()}, of at most {self.batches} batches",
                received=f"{state}",
                remedy="keep dataset, global batch, seed and shuffle; ranks and micro-batches may change",
            )
        self.epoch, self._done = int(state["epoch"]), int(state["done"])
        self._start = self._done

    def _identity(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "of": self.batch.of,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }
