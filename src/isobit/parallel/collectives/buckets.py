"""Many tensors exchanged in few buckets, each launched as soon as it is full, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import AgreementError, ArgumentError
from isobit.parallel.collectives.all_reduce import all_reduce
from isobit.parallel.collectives.async_work import Flight
from isobit.parallel.collectives.hierarchy import TwoLevel

# The last element of a bucket is the number of its use; sums over up to 4096 ranks are exact in fp32.
MOST_STAMPS = 4096


class BucketedExchange:
    """Sums tensors of known sizes over ranks; may be used again after each finish().

    Tensors are listed as they are expected to become ready (gradients: the last layer first). A full bucket waits
    for those before it, since ranks may be ready in different orders, and must launch in one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        group: dist.ProcessGroup | TwoLevel | None = None,
        bucket_bytes: int = 25 << 20,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group, self._sizes, self._dtype, self._device = group, tuple(sizes), dtype, device
        self._members = group_by_size(sizes, bucket_bytes // dtype.itemsize)
        self._bucket_of = {
            index: number for number, members in enumerate(self._members) for index in members
        }
        self._uses, self._given_up = 0, list[Flight]()
        self._begin()

    def _begin(self) -> None:
        """Buckets are new for each use: the last ones are the caller's, or still fly."""
        self._uses += 1
        self._missing = [set(members) for members in self._members]
        self._flights: list[Flight] = []
        self._buckets: dict[int, Tensor] = {}
        self._slots: dict[int, Tensor] = {}

    def _make(self, number: int) -> None:
        sizes = [self._sizes[index] for index in self._members[number]]
        bucket = torch.empty(sum(sizes) + 1, dtype=self._dtype, device=self._device)
        bucket[-1] = self._uses % MOST_STAMPS
        self._buckets[number] = bucket
        self._slots.update(zip(self._members[number], torch.split(bucket[:-1], sizes), strict=True))

    def ready(self, index: int, tensor: Tensor) -> None:
        """Copies a tensor into its slot; launches every bucket that is full and has none unlaunched before it."""
        number = self._bucket_of[index]
        if index not in self._missing[number]:
            raise ArgumentError(
                expected="each tensor once before finish()",
                received=f"tensor {index} again",
                remedy="call finish(), or add what belongs together before it is ready",
            )
        if number not in self._buckets:
            self._make(number)
        self._slots[index].copy_(tensor.detach().reshape(-1))
        self._missing[number].remove(index)
        while len(self._flights) < len(self._members) and not self._missing[len(self._flights)]:
            flight = all_reduce(self._buckets[len(self._flights)], self._group, async_op=True)
            assert flight is not None
            self._flights.append(flight)

    def clear(self) -> None:
        """Gives up what was made ready: the step failed. What flies is waited for by the next finish(), not here:
        another rank may never launch its part, and the error that is under way must be heard."""
        self._given_up += self._flights
        self._begin()

    def finish(self) -> list[Tensor]:
        """Waits; the sums, by index, are views of buckets that are the caller's from now on."""
        missing = sorted(set().union(*self._missing))
        if missing:
            raise ArgumentError(
                expected=f"all {len(self._sizes)} tensors",
                received=f"none for {missing[:8]}",
                remedy="an absent contribution is +0.0: pass zeros",
            )
        for flight in [*self._given_up, *self._flights]:
            flight.wait()
        self._given_up.clear()
        wanted = self._uses % MOST_STAMPS * ranks_of(self._group)
        if any(bucket[-1] != wanted for bucket in self._buckets.values()):
            raise AgreementError(
                expected="one step on all ranks",
                received="sums over ranks of which some gave up a step that the others went on with",
                remedy="let a step fail on all ranks, or begin again from a checkpoint",
            )
        slots = self._slots
        self._begin()
        return [slots[index] for index in range(len(slots))]


def ranks_of(group: dist.ProcessGroup | TwoLevel | None) -> int:
    """How many are summed over."""
    if isinstance(group, TwoLevel):
        return dist.get_world_size(group.inner) * dist.get_world_size(group.outer)
    return dist.get_world_size(group)


def group_by_size(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive indices whose sizes sum to at most `limit`; a larger one is alone."""
    groups: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups
