"""Packed weights for decoding, which are repacked after every write to the weight that torch makes.

[Note: Writes to a frozen weight]
The kernels read a packed copy of the weight, so every write to the weight must be noticed. The weight's storage is made
copy-on-write, and a lazy clone of it is kept: torch moves the weight to other memory before anything writes to it
through the parameter, `.data`, a view or a data pointer, and every call compares addresses. It would not be enough to
check whether the storage is copy-on-write at the moment: a later lazy clone makes it so again.
Torch cannot see a write through a raw address that was taken earlier (ctypes, a C extension). Memory with other owners
is not frozen, and not packed again while they exist, but a bare address has no owner: such a write is not noticed.

[Note: who owns a weight]
`weight.untyped_storage()`, which saving and vLLM's loader call, leaves a Python object of torch's that counts as an
owner for as long as the memory exists. Nothing can be written through it while no program refers to it, and a write
through it is noticed like any other. So owners are counted beyond those that a tensor of our own has, where the object
was made and dropped: other tensors, and other references to the object.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from isobit.errors import ArgumentError, EngineError
from isobit.ops import dispatch


class PackedWeight:
    """The packed form of one weight, repacked when the weight was written."""

    repacks: int
    _packed: Tensor
    # Keeps the memory that was packed, so that nothing else can be allocated at its address.
    _kept: Tensor | None
    _place: tuple[object, ...]

    def __init__(self, weight: Tensor) -> None:
        if weight.is_cuda:
            raise EngineError(
                expected="a weight on the CPU",
                received=f"one on {weight.device}, whose kernels read the weight itself",
                remedy="do not freeze modules on a GPU",
            )
        if not dispatch.is_native(weight.dtype):
            raise EngineError(
                expected=f"native kernels for {weight.dtype}",
                received="the portable executor, which has no packed form",
                remedy="run `isobit doctor` to see why, or do not freeze",
            )
        owners = count_owners(weight)
        if owners > 1:
            raise ArgumentError(
                expected="a weight whose memory only the module owns",
                received=f"{owners} owners (views, state dicts, NumPy arrays), whose writes may go unseen",
                remedy="drop the other references, or set module.weight.data = module.weight.data.clone()",
            )
        if not torch.ops.isobit.watch(weight):
            raise ArgumentError(
                expected="a weight in memory of torch's own allocator",
                received="shared, mapped or foreign memory, whose writes torch cannot see",
                remedy="set module.weight.data = module.weight.data.clone()",
            )
        self.repacks = 0
        self._pack(weight)

    def is_current(self, weight: Tensor) -> bool:
        """Return whether the weight was not written since it was packed."""
        return self._place == place_of(weight)

    def current(self, weight: Tensor) -> Tensor | None:
        """Return the packed form of the weight's present values; None while its written memory has other owners."""
        if self.is_current(weight):
            return self._packed
        self._kept, self._place = None, ()  # frees the memory that the weight had before
        if count_owners(weight) > 1 or not torch.ops.isobit.watch(weight):
            return None
        self.repacks += 1
        self._pack(weight)
        return self._packed

    @property
    def nbytes(self) -> int:
        """Memory of the packed form in bytes."""
        return self._packed.nbytes

    def _pack(self, weight: Tensor) -> None:
        self._packed = torch.ops.isobit.pack_weight(weight.detach())
        self._kept = torch._lazy_clone(weight.detach())
        self._place = place_of(weight)


def place_of(weight: Tensor) -> tuple[object, ...]:
    """Return what does not change while a packed form is current; reading the address is not a write."""
    address = torch._C._data_address(weight)  # type: ignore[attr-defined]
    return address, weight.dtype, weight.shape, weight.stride()


def count_owners(weight: Tensor) -> int:
    """Return how many hold the weight's memory, the weight included; see [Note: who owns a weight]."""
    return 1 + count_references(weight) - count_references(torch.empty(1))


def count_references(weight: Tensor) -> int:
    """Return the references to the weight's storage, from tensors and from Python."""
    storage = weight.untyped_storage()
    return int(torch.ops.isobit.count_owners(weight)) + sys.getrefcount(storage)
