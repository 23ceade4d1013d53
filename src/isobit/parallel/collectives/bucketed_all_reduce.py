"""All-reduce of many tensors in a few buckets, each launched as soon as it is full."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.errors import AgreementError, ArgumentError
from isobit.parallel.collectives.async_work import AsyncWork
from isobit.parallel.collectives.levels import Group, rank_count, rank_in
from isobit.parallel.collectives.tree_collectives import all_reduce, all_reduce_rounded

# The last element of a bucket is the step number modulo this, on rank 0 times 1 - ranks. The sum over
# up to 4096 ranks is exact in fp32 and zero if all are at one step; rounding keeps what is not zero.
STEP_NUMBERS = 4096


class BucketedAllReduce:
    """Sum tensors of known sizes over ranks; reusable after each `finish()`.

    A full bucket is launched only after those before it: ranks may fill buckets in different orders
    and must launch collectives in one.

    Args:
        sizes: The number of elements of each tensor, in the order in which they are expected to be
            ready (for gradients: the last layer first).
        group: The ranks to sum over, or `Levels`; None is the default group.
        bucket_bytes: The size of a bucket; a larger tensor has a bucket of its own.
        dtype: The dtype of all tensors.
        device: The device of all tensors.
        rounded: The dtype of the sums; None is that of the tensors.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        group: Group = None,
        bucket_bytes: int = 25 << 20,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rounded: torch.dtype | None = None,
    ) -> None:
        """Assign tensors to buckets."""
        self._group, self._sizes, self._dtype, self._device = group, tuple(sizes), dtype, device
        self._rounded = rounded
        self._members = group_by_size(sizes, bucket_bytes // dtype.itemsize)
        self._bucket_of = {
            index: number for number, members in enumerate(self._members) for index in members
        }
        self._step, self._abandoned = 0, list[AsyncWork]()
        self._begin()

    def _begin(self) -> None:
        """Start a step with new buckets: the last ones belong to the caller or are still being summed."""
        self._step += 1
        self._missing = [set(members) for members in self._members]
        self._works: list[AsyncWork] = []
        self._buckets: dict[int, Tensor] = {}  # by bucket number # [sum of sizes + 1, or more]
        self._totals: dict[int, Tensor] = {}  # the sums: the buckets, or rounded # [the same]
        self._slots: dict[int, Tensor] = {}  # by tensor index: views of the buckets # [size]

    def _make_bucket(self, number: int) -> None:
        sizes = [self._sizes[index] for index in self._members[number]]
        ranks, held = rank_count(self._group), sum(sizes)
        # A multiple of the ranks: collectives would copy the bucket to pad it.
        bucket = torch.empty(held // ranks * ranks + ranks, dtype=self._dtype, device=self._device)
        first = rank_in(self._group) == 0
        bucket[held:] = self._step % STEP_NUMBERS * (1 - ranks if first else 1)
        self._buckets[number] = bucket
        self._slots.update(zip(self._members[number], self._parts(bucket, number), strict=True))

    def _parts(self, bucket: Tensor, number: int) -> list[Tensor]:
        sizes = [self._sizes[index] for index in self._members[number]]
        return list(torch.split(bucket[: sum(sizes)], sizes))

    def ready(self, index: int, tensor: Tensor) -> None:
        """Copy a tensor into its bucket and launch every bucket whose turn it is.

        Raises:
            ArgumentError: This tensor was already given in this step.
        """
        number = self._bucket_of[index]
        if index not in self._missing[number]:
            raise ArgumentError(
                expected="each tensor once before finish()",
                received=f"tensor {index} again",
                remedy="call finish() first, or add contributions before calling ready()",
            )
        if number not in self._buckets:
            self._make_bucket(number)
        self._slots[index].copy_(tensor.detach().reshape(-1))
        self._missing[number].remove(index)
        while len(self._works) < len(self._members) and not self._missing[len(self._works)]:
            self._works.append(self._launch(len(self._works)))

    def _launch(self, number: int) -> AsyncWork:
        bucket = self._totals[number] = self._buckets[number]
        if self._rounded is None:
            work = all_reduce(bucket, self._group, async_op=True)
            assert work is not None
            return work
        totals = torch.empty(bucket.numel(), dtype=self._rounded, device=self._device)
        self._totals[number] = totals
        return all_reduce_rounded(bucket, totals, self._group)

    def clear(self) -> None:
        """Abandon this step after a failure.

        Running collectives are waited for by the next `finish()`, not here: another rank may
        never launch its side, and the exception that is being raised must reach the user.
        """
        self._abandoned += self._works
        self._begin()

    def finish(self) -> list[Tensor]:
        """Wait for all buckets.

        Returns:
            The sums by index, as 1-D views of buckets that the caller owns from now on.

        Raises:
            ArgumentError: A tensor was not given.
            AgreementError: Some ranks abandoned a step that others finished.
        """
        missing = sorted(set().union(*self._missing))
        if missing:
            raise ArgumentError(
                expected=f"all {len(self._sizes)} tensors",
                received=f"none for {missing[:8]}",
                remedy="pass zeros for a tensor without a contribution",
            )
        for work in [*self._abandoned, *self._works]:
            work.wait()
        self._abandoned.clear()
        if any(bucket[-1] != 0 for bucket in self._totals.values()):
            raise AgreementError(
                expected="the same step on all ranks",
                received="a sum to which some ranks contributed another step than this one",
                remedy="let a step fail on all ranks, or restart from a checkpoint",
            )
        sums = {
            index: part
            for number, members in enumerate(self._members)
            for index, part in zip(members, self._parts(self._totals[number], number), strict=True)
        }
        self._begin()
        return [sums[index] for index in range(len(sums))]


def group_by_size(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group consecutive indices whose sizes sum to at most `limit`; a larger one is alone."""
    groups: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += size
    return groups
