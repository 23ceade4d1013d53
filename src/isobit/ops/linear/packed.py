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

[Note: weights that another thread writes]
A write that is under way when the weight is packed has the address already, so copy-on-write does not move it, and it
goes on behind the packed form. Such a write is noticed by one of two things. A write through an alias (`.data`, a view)
holds the alias until it has ended, which counts as an owner: nothing is packed meanwhile. A write to the parameter
itself changes its version when it has ended: the version is read before the memory is shared, and is compared with the
address at every call. So the first call after the last write has ended packs what was written, whatever was packed
before. A snapshot (clone, packed form and place) is published as one object, and a call reads the snapshot's clone
rather than the weight: the memory stays as it is, and stays allocated, while the call holds the snapshot. A call that
finds no snapshot, because others own the memory, reads an alias, which is an owner too: `weight.data = …` of another
thread then does not free what the call reads. Where all other owners are such aliases, a call reads a copy instead:
otherwise calls of several threads could keep each other from packing for ever.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from isobit.errors import ArgumentError, EngineError
from isobit.ops import dispatch


class Snapshot(NamedTuple):
    """One state of a weight. Hold it during a call: another thread may publish a later one, and free this memory.

    Attributes:
        weight: A lazy clone of the weight, which calls read; writes to the weight do not reach it.
        guard: Another one, which nobody else has: as long as it shares the weight's memory, a write moves the weight,
            and nothing else is allocated at its address.
        place: What `place_of` returned for the weight.
        packed: The packed form; None where only the memory is watched, or while a write may be under way.
    """

    weight: Tensor
    guard: Tensor
    place: tuple[object, ...]
    packed: Tensor | None = None


class WatchedWeight:
    """A weight whose memory stays as it is, and allocated, during a call that reads it, whatever others write."""

    has_packed_form = False

    def __init__(self, weight: Tensor) -> None:
        self.holders = 0  # handles that `freeze` gave out for it
        self.repacks = 0  # snapshots that were taken because of a write
        self._lock = threading.Lock()
        self._is_released = False
        # It was taken once: a later snapshot then follows a write.
        self._was_taken = False
        self._snapshot: Snapshot | None = None
        # Aliases that calls read, each with the storage that it was made of.
        self._aliases: list[tuple[int, weakref.ref[Tensor]]] = []
        if self.current(weight) is None:
            refuse_memory(weight)

    def is_current(self, weight: Tensor) -> bool:
        """Return whether the weight was not written since the last snapshot of it."""
        snapshot = self._snapshot
        return snapshot is not None and snapshot.place == place_of(weight)

    def current(self, weight: Tensor) -> Snapshot | None:
        """Return a snapshot of the weight's present values; None while its memory cannot be shared."""
        if not is_plain(weight):
            return None
        snapshot = self._snapshot
        if snapshot is not None and self._is_complete(snapshot) and self.is_current(weight):
            return snapshot
        with self._lock:
            return None if self._is_released else self._renew(weight)

    def hold(self, weight: Tensor) -> Tensor:
        """Return the weight for a call that has no snapshot: an alias or a copy, whose memory nobody else frees."""
        if not is_plain(weight):
            return weight
        with self._lock:
            storage = weight.untyped_storage()._cdata
            self._aliases = [known for known in self._aliases if known[1]() is not None]
            ours = sum(made_of == storage for made_of, _ in self._aliases)
            alias = weight.detach()
            if ours and count_owners(weight) - ours <= 2:  # the weight, and this alias
                return alias.clone()
            self._aliases.append((storage, weakref.ref(alias)))
            return alias

    def release(self) -> None:
        """Drop the snapshot and take no other: also for copies of a layer that share this object."""
        with self._lock:
            self._is_released, self._snapshot = True, None

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of a frozen layer is not frozen."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Be None in a pickle: a copy of a frozen layer is not frozen."""
        return type(None), ()

    def _is_complete(self, snapshot: Snapshot) -> bool:
        return snapshot.packed is not None or not self.has_packed_form

    def _renew(self, weight: Tensor) -> Snapshot | None:
        """Take a snapshot, unless another thread has done so; the lock is held."""
        known = self._snapshot if self.is_current(weight) else None
        if known is not None and (self._is_complete(known) or count_owners(weight) > 1):
            return known
        taken = take_snapshot(weight)
        if taken is not None and known is None:
            self.repacks += int(self._was_taken)
            self._was_taken = True
        self._snapshot = taken  # frees the memory that the weight had before
        if taken is None or not self.has_packed_form or count_owners(weight) > 1:
            return taken
        packed = torch.ops.isobit.pack_weight(taken.weight)
        self._snapshot = taken._replace(packed=packed)
        return self._snapshot


class PackedWeight(WatchedWeight):
    """The packed form of one weight, repacked when the weight was written."""

    has_packed_form = True

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
        if hasattr(weight, "placements"):
            raise ArgumentError(
                expected="a weight that is on one rank",
                received=f"one that is distributed over ranks, {weight.placements}",
                remedy="freeze a copy of the model whose weights are gathered, or do not freeze",
            )
        super().__init__(weight)

    @property
    def nbytes(self) -> int:
        """Memory of the packed form in bytes; 0 while there is none."""
        snapshot = self._snapshot
        return 0 if snapshot is None or snapshot.packed is None else snapshot.packed.nbytes


def take_snapshot(weight: Tensor) -> Snapshot | None:
    """Share the weight's memory; None where others own it. See [Note: weights that another thread writes]."""
    version = None if weight.is_inference() else weight._version
    weight.untyped_storage()  # makes the object that counts as an owner
    owners = int(torch.ops.isobit.count_owners(weight))
    if count_owners(weight) > 1:
        return None
    # Refuses an owner that came since: a NumPy array would lose the weight at the next write.
    guard = torch.ops.isobit.share_memory(weight, owners)
    if guard is None:
        return None
    shared = torch.ops.isobit.share_memory(guard, 1)
    place = (*place_of(guard)[:-1], version)
    return Snapshot(shared, guard, place)


def is_plain(weight: Tensor) -> bool:
    """Return whether a tensor is its memory: no wrapper of torch.func, no fake tensor, no negated view."""
    return not int(torch._C._dispatch_keys(weight).raw_repr()) & ~PLAIN_KEYS


# The dispatch keys of a tensor on the CPU, as bits.
PLAIN_KEYS = 0
for _name in ("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU"):
    PLAIN_KEYS |= int(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name)).raw_repr())


def refuse_memory(weight: Tensor) -> None:
    """Raise ArgumentError for a weight whose memory cannot be shared."""
    owners = count_owners(weight)
    if owners > 1:
        raise ArgumentError(
            expected="a weight whose memory only the module owns",
            received=f"{owners} owners (views, state dicts, NumPy arrays), whose writes may go unseen",
            remedy="drop the other references, or set module.weight.data = module.weight.data.clone()",
        )
    raise ArgumentError(
        expected="a weight in memory of torch's own allocator",
        received="shared, mapped or foreign memory, whose writes torch cannot see",
        remedy="set module.weight.data = module.weight.data.clone()",
    )


def place_of(weight: Tensor) -> tuple[object, ...]:
    """Return what does not change while a packed form is current; reading the address is not a write."""
    address = torch._C._data_address(weight)  # type: ignore[attr-defined]
    version = None if weight.is_inference() else weight._version
    return address, weight.dtype, weight.shape, weight.stride(), version


def count_owners(weight: Tensor) -> int:
    """Return how many hold the weight's memory, the weight included; see [Note: who owns a weight]."""
    return 1 + count_references(weight) - count_references(torch.empty(1))


def count_references(weight: Tensor) -> int:
    """Return the references to the weight's storage, from tensors and from Python."""
    storage = weight.untyped_storage()
    return int(torch.ops.isobit.count_owners(weight)) + sys.getrefcount(storage)
