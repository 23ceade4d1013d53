"""The interface of a data transfer between ranks, and the transfers that stay on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from isobit.parallel.collectives.elementwise_add import round_into


class Transfer(Protocol):
    """One stage of a collective."""

    runs_in_thread: bool  # whether the communicator's thread may run it while the caller computes

    def start(self) -> None:
        """Launch the first messages."""

    def finish(self) -> None:
        """Return when the result is in place."""


class LocalCopy:
    """Copy from one tensor to another on this rank."""

    runs_in_thread = True

    def __init__(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` to `target`, of one shape."""
        self.source, self.target = source, target

    def start(self) -> None:
        """Do nothing: a copy is done in `finish`."""

    def finish(self) -> None:
        """Copy."""
        self.target.copy_(self.source)


class LocalRound:
    """Round this rank's sums once, so that the rounded ones are sent."""

    runs_in_thread = True

    def __init__(self, sums: Tensor, rounded: Tensor) -> None:
        """Round `sums` into `rounded`, of one shape and a narrower dtype."""
        self.sums, self.rounded = sums, rounded

    def start(self) -> None:
        """Do nothing: rounding is done in `finish`."""

    def finish(self) -> None:
        """Round."""
        round_into(self.sums, self.rounded)


class Sequential:
    """Run transfers one after another."""

    def __init__(self, *transfers: Transfer) -> None:
        """Run these transfers in this order; without any, do nothing."""
        self.transfers: list[Transfer] = []
        for transfer in transfers:
            self.transfers += transfer.transfers if isinstance(transfer, Sequential) else [transfer]
        # What does nothing needs no thread, and the simulator would not see one.
        self.runs_in_thread = bool(self.transfers) and all(t.runs_in_thread for t in self.transfers)

    def start(self) -> None:
        """Start the first transfer."""
        for transfer in self.transfers[:1]:
            transfer.start()

    def finish(self) -> None:
        """Finish each transfer before the next one starts."""
        for index, transfer in enumerate(self.transfers):
            if index:
                transfer.start()
            transfer.finish()


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for every work, in order."""
    for work in works:
        work.wait()
