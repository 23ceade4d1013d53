"""What must not matter, as data: row counts, places, storage layouts, threads, paddings, micro-batches, cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

EVERY_ROW_COUNT = tuple(range(1, 258))
# Each tile edge of the kernels and its neighbours, for the quick sweep.
SOME_ROW_COUNTS = (1, 2, 5, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257)

THREADS = (1, 2)
MICRO_BATCHES = (1, 2, 4)
CUTS = (2, 4, 8, 16)

# Unequal, one empty, one beyond a leaf of 256 tokens, one odd beyond 512.
SAMPLE_LENGTHS = (11, 16, 0, 300, 13, 19, 1, 515)


def places(rows: int) -> tuple[int, ...]:
    """First, middle, last."""
    return tuple(sorted({0, rows // 2, rows - 1}))


def transposed(tensor: Tensor) -> Tensor:
    """The same values, stored column by column."""
    return tensor.t().contiguous().t()


def strided(tensor: Tensor) -> Tensor:
    """The same values, three apart."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1], 3)
    wide[..., 1] = tensor
    return wide[..., 1]


def misaligned(tensor: Tensor) -> Tensor:
    """The same values, contiguous, one element off any alignment."""
    room = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    room.copy_(tensor)
    return room


def padded_rows(tensor: Tensor) -> Tensor:
    """The same values, with an odd gap after each row."""
    wide = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 7)
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "strided": strided,
    "misaligned": misaligned,
    "padded rows": padded_rows,
}


@contextmanager
def thread_count(count: int) -> Iterator[None]:
    """Runs with so many threads, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
