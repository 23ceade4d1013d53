"""DataLoaders with workers and pinned memory on a served device.

torch pins batches in a thread of its own, which is no thread of the rank, so that it finds no device. Here the rank
pins each batch when it takes it: the same calls in the same order, without the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory

from isobit.simulator import rank as ranks
from isobit.simulator.program.replaced import replaced

WithWorkers: Any = dataloader._MultiProcessingDataLoaderIter
pin: Any = pin_memory.pin_memory  # untyped in torch


def without_thread(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of iterators that start no thread to pin memory, if they have workers."""

    def construct(self: Any, loader: Any) -> None:
        plain(self, loader)
        if ranks.inside() and isinstance(self, WithWorkers):
            self.pinned_by_rank, self._pin_memory = self._pin_memory, False

    return construct


def pinned(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the next batch, and pins it."""

    def next_data(self: Any) -> Any:
        data = plain(self)
        return pin(data) if getattr(self, "pinned_by_rank", False) else data

    return next_data


@contextmanager
def pinned_by_ranks() -> Iterator[None]:
    """Let ranks pin the batches of their workers."""
    iterator: Any = dataloader._BaseDataLoaderIter
    with (
        replaced(iterator, "__init__", without_thread(vars(iterator)["__init__"])),
        replaced(WithWorkers, "_next_data", pinned(vars(WithWorkers)["_next_data"])),
    ):
        yield
