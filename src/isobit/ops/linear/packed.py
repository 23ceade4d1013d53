"""Packed weights for decoding: kept on purpose, reversible, and never stale.

The kernels' form of a weight is a copy, so a write to the weight must not go unseen. The weight's storage is
made copy-on-write: from then on whoever asks torch for its memory to write, through the parameter, `.data`, a
view or a data pointer, makes the storage plain again, which every call checks. What torch cannot see is a raw
pointer taken before: freezing memory that has other owners is refused, and such memory is not packed again
while they hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.errors import ArgumentError, EngineError
from isobit.ops import dispatch


class PackedWeight:
    """The packed form of one weight, repacked when the weight was written."""

    repacks: int
    _packed: Tensor
    _watched: Tensor
    _layout: tuple[object, ...]

    def __init__(self, weight: Tensor) -> None:
        if not dispatch.is_native(weight.dtype):
            raise EngineError(
                expected=f"native kernels for {weight.dtype}",
                received="the portable executor, which has no packed form",
                remedy="run `isobit doctor` to see why, or do not freeze",
            )
        owners = int(torch.ops.isobit.count_owners(weight))
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

    def current(self, weight: Tensor) -> Tensor | None:
        """The packed form of what the weight holds now; None while others hold memory that was written."""
        if self._layout == layout_of(weight) and torch.ops.isobit.is_clean(weight, self._watched):
            return self._packed
        self._watched = torch.empty(0)  # so that it is no owner
        if int(torch.ops.isobit.count_owners(weight)) > 1 or not torch.ops.isobit.watch(weight):
            return None
        self.repacks += 1
        self._pack(weight)
        return self._packed

    @property
    def nbytes(self) -> int:
        """Memory taken beside the weight itself."""
        return self._packed.nbytes

    def _pack(self, weight: Tensor) -> None:
        self._packed = torch.ops.isobit.pack_weight(weight.detach())
        self._watched, self._layout = weight.detach(), layout_of(weight)


def layout_of(weight: Tensor) -> tuple[object, ...]:
    """What else must be unchanged for a packed form to be current."""
    return weight.dtype, tuple(weight.shape), weight.stride(), weight.storage_offset()
