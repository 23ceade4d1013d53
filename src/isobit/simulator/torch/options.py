"""Arguments of torch's process-group methods: option records, and tensors as lists of shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import UnsupportedError

Options = Any  # torch's option records: one class per collective, with the same attributes


def is_asynchronous(options: Options) -> bool:
    """Return whether the caller waits later; callers in C++ (DDP, functional collectives) do."""
    return bool(getattr(options, "asyncOp", True))


def reduction(options: Options) -> Any:
    """Return the reduction of an option record, or a plain `ReduceOp` itself."""
    return getattr(options, "reduceOp", options) if options is not None else dist.ReduceOp.SUM


def root_of(options: Options) -> int:
    """Return the root of an option record, or a plain number itself."""
    root: Any = getattr(options, "rootRank", options)
    return int(root)


def as_list(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    """Return a list of tensors: some callers pass a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def slots(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a tensor into equal shares."""
    if not tensor.is_contiguous() or tensor.numel() % count:
        raise UnsupportedError(
            expected=f"a contiguous tensor of {count} equal shares",
            received=f"{tuple(tensor.shape)} with strides {tensor.stride()}",
            remedy="call .contiguous(), or use the list form for unequal shares",
        )
    return list(tensor.detach().view(-1).view(count, tensor.numel() // count).unbind())


def split(tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """Cut a tensor into shares of the given numbers of rows, or into equal shares."""
    if not sizes:
        return slots(tensor, count)
    return list(torch.split_with_sizes(tensor.detach(), list(sizes)))
