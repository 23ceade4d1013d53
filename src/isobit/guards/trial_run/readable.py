"""Which tensors have bits that can be read in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isobit.guards.live.module_replay import tensors_in


def can_digest(tensor: Tensor) -> bool:
    """Return whether a tensor has bits to read here: a wrapper, as DTensor is, has no memory of its own."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and not is_traceable_wrapper_subclass(tensor)
    )


def readable_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value that have bits to read; results of collectives are waited for."""
    for tensor in tensors_in(value):
        plain = tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            plain = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        if can_digest(plain):
            yield plain
