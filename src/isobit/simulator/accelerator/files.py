"""Files of tensors on served devices: `torch.save` records the device, and `torch.load` puts the tensor back on it.

As on a GPU, a file that rank 0 wrote names `cuda:0`, so that a rank which loads it without `map_location` uses the
device of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isobit.simulator import rank as ranks
from isobit.simulator.accelerator.tensors import served_index
from isobit.simulator.program.replaced import replaced

registry: Any = torch.serialization
FIRST = 0  # before the CPU's own entry, which has priority 10


def tag(storage: Any) -> str | None:
    """Return the device of a storage that is being saved, or None for torch to decide."""
    rank = ranks.owner()
    index = None if rank is None else rank.stored_devices.get(storage._cdata)
    return None if rank is None or index is None else f"{rank.accelerator}:{index}"


def restore(storage: Any, location: str) -> Any:
    """Note the device of a storage that is being loaded; None for torch to decide."""
    rank = ranks.owner()
    index = None if rank is None else served_index(location, rank)
    if rank is None or index is None:
        return None
    rank.stored_devices[storage._cdata] = index
    return storage


def clean(function: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a function of torch after which, on a rank, the notes are used and forgotten."""

    def call(*args: Any, **options: Any) -> Any:
        if not ranks.inside():
            return function(*args, **options)
        rank = ranks.current()
        rank.stored_devices.clear()
        try:
            result = function(*args, **options)
            after(result)
            return result
        finally:
            rank.stored_devices.clear()

    return call


def put_back(loaded: Any) -> None:
    """Give loaded tensors the devices that were noted."""
    rank = ranks.current()
    for leaf in tree_leaves(loaded):
        parts = [*leaf.parameters(), *leaf.buffers()] if isinstance(leaf, nn.Module) else [leaf]
        for part in parts:
            if isinstance(part, Tensor) and part.layout is torch.strided:
                index = rank.stored_devices.get(part.untyped_storage()._cdata)
                if index is not None:
                    rank.device_marks[part] = index
                    rank.devices_used.setdefault(index, [])


def reduce_of(plain: Any) -> Any:
    """Return a `Tensor.__reduce_ex__` that notes the device of what is pickled; torch has no mode for it."""

    def __reduce_ex__(self: Tensor, protocol: Any) -> Any:
        rank = ranks.owner()
        index = None if rank is None or rank.device_marks is None else rank.device_marks.get(self)
        if rank is not None and index is not None:
            rank.stored_devices[self.untyped_storage()._cdata] = index
        return plain(self, protocol)

    return __reduce_ex__


@contextmanager
def devices_in_files() -> Iterator[None]:
    """Make `torch.save` and `torch.load` keep served devices."""
    entry = (FIRST, tag, restore)
    registry._package_registry.insert(0, entry)
    try:
        with (
            replaced(Tensor, "__reduce_ex__", reduce_of(vars(Tensor)["__reduce_ex__"])),
            replaced(torch, "save", clean(torch.save, lambda result: None)),
            replaced(torch, "load", clean(torch.load, put_back)),
        ):
            yield
    finally:
        registry._package_registry.remove(entry)
