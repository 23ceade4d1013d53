"""Placements of the samples of a batch in memory: packed, padded on a side, or stored in reverse.

A claim about samples computes the packed batch once, moves the same rows to each placement among random
padding, and compares bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.order.samples import Samples

# Unequal, one empty, one longer than a leaf of 256 tokens, one odd and longer than 512.
SAMPLE_LENGTHS = (11, 16, 0, 300, 13, 19, 1, 515)


def placements(lengths: Sequence[int], width: int) -> Iterator[tuple[str, Samples]]:
    """Yield a name and the samples: padded to `width` on either side, and stored in reverse."""
    for side in ("left", "right"):
        yield f"padded {side}", Samples.padded(lengths, width=width, side=side)
    yield "stored in reverse", in_reverse(Samples.packed(lengths))


def in_reverse(described: Samples) -> Samples:
    """Return the same samples, the last one first in memory, with a row of padding before each."""
    spans, at = [], 1
    for _, length in reversed(described.spans):
        spans.append((at, length))
        at += length + 1
    return Samples(tuple(reversed(spans)), at, 0, len(spans))


def put(room: Tensor, packed: Tensor, described: Samples) -> Tensor:
    """Write packed rows into `room` at the places of the samples, and return it."""
    at = 0
    for start, length in described.spans:
        room[start : start + length] = packed[at : at + length]
        at += length
    return room


def put_among_random(case: Case, packed: Tensor, described: Samples, stream: int) -> Tensor:
    """Return packed rows at the places of the samples; all other rows are random."""
    return put(case.draw((described.rows, *packed.shape[1:]), stream, "wide"), packed, described)


def rows_of(described: Samples) -> Tensor:
    """Return the indices of the samples' rows, in the order of the samples."""
    return torch.cat([torch.arange(start, start + length) for start, length in described.spans])


def is_real(described: Samples) -> Tensor:
    """Return a mask that is False at padding."""
    mask = torch.zeros(described.rows, dtype=torch.bool)
    for start, length in described.spans:
        mask[start : start + length] = True
    return mask


def in_every_storage_and_thread_count(
    compare: Callable[..., None], tensors: Sequence[Tensor], described: Samples
) -> None:
    """Call `compare(*tensors, described, where)` for every memory layout and every thread count."""
    for name, store in LAYOUTS.items():
        compare(*(store(t) for t in tensors), described, f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(*tensors, described, f"{threads} threads")
