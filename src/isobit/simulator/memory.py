"""Ranges of memory that tensors occupy, and whether two sets of tensors overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Memory = Mapping[int, Sequence[tuple[int, int]]]  # storage -> [start, end) in bytes


def memory_of(tensors: Iterable[Tensor]) -> Memory:
    """Return the bytes that tensors occupy, by storage, so that slices of one buffer are distinct.

    Wrapper subclasses (DTensor) are skipped: operators see their inner tensors as well.
    """
    memory: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.layout is not torch.strided
            or not tensor.numel()
        ):
            continue
        first, width = int(tensor.storage_offset()), tensor.element_size()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = first * width
        runs = memory.setdefault(tensor.untyped_storage()._cdata, [])
        if runs and runs[-1][1] == start:  # consecutive slices of one buffer
            start = runs.pop()[0]
        runs.append((start, (last + 1) * width))
    return memory


def overlap(left: Memory, right: Memory) -> bool:
    """Return whether any byte belongs to both."""
    return any(
        a < d and c < b
        for storage in left.keys() & right.keys()
        for a, b in left[storage]
        for c, d in right[storage]
    )
