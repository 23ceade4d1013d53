"""The public all-reduce, reduce-scatter and all-gather: rank r is leaf r of a balanced tree.

The order of addition does not depend on the backend, the network, message sizes or which rank is
ready first. It is described in [Note: the reduction tree over ranks] (transfers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import AgreementError, ArgumentError, CutError
from isobit.ops.arguments import refuse_distributed
from isobit.parallel.collectives.communicator import AsyncWork, Communicator, communicator_of
from isobit.parallel.collectives.elementwise_add import subnormals_kept
from isobit.parallel.collectives.levels import Group, Levels, rank_count, rank_in
from isobit.parallel.collectives.transfers import Transfer, gather_over, reduce_over, scatter_over


def all_reduce(tensor: Tensor, group: Group = None, *, async_op: bool = False) -> AsyncWork | None:
    """Sum a tensor over ranks, in place, in the order ((0+1)+(2+3))+((4+5)+(6+7)).

    Args:
        tensor: fp32 or fp64, of the same shape on all ranks; overwritten by the sum.
        group: A process group of 2^n ranks, or `Levels`; None is the default group.
        async_op: Return a work at once instead of waiting.

    Returns:
        None, or with `async_op` a work whose `wait()` returns when the sum is in place.

    Raises:
        CutError: The number of ranks is not a power of two.
        ArgumentError: The dtype is not fp32 or fp64, or this rank is not in the group.

    Example:
        Four simulated ranks; adding them one after another would give 1.

        >>> import torch
        >>> import isobit
        >>> from isobit.simulator import World
        >>> def add(rank):
        ...     x = torch.tensor([1.0, 1e8, -1e8, 1.0])[rank]
        ...     isobit.parallel.all_reduce(x)
        ...     return x.item()
        >>> World(4).run(add).values  # (1 + 1e8) + (-1e8 + 1)
        [0.0, 0.0, 0.0, 0.0]
    """
    comms = _summing_communicators(group, tensor)
    flat, copy_back = _flatten(tensor)
    return _launch(reduce_over(comms, flat), copy_back, tensor, comms[0], async_op)


def all_reduce_rounded(flat: Tensor, rounded: Tensor, group: Group = None) -> AsyncWork:
    """Start a sum over ranks that is rounded once: [Note: rounding before the return].

    Args:
        flat: fp32 addends, of one length on all ranks; overwritten. # [numel]
        rounded: Receives the sums in its own dtype. # [numel]
        group: As for `all_reduce`.
    """
    comms = _summing_communicators(group, flat)
    target, copy_back = _flatten(rounded, read=False)
    transfer = reduce_over(comms, flat, target)
    work = _launch(transfer, copy_back, rounded, comms[0], async_op=True)
    assert work is not None
    return work


def reduce_scatter(
    output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False
) -> AsyncWork | None:
    """Sum a tensor over ranks and leave the r-th of P equal shares of the sum on rank r.

    Args:
        output: Receives this rank's share of the sum. # [numel/ranks]
        input: fp32 or fp64, of the same shape on all ranks; not changed. # [numel]
        group: A process group of 2^n ranks, or `Levels`; None is the default group.
        async_op: Return a work at once instead of waiting.

    Returns:
        None, or with `async_op` a work whose `wait()` returns when the sum is in place.

    Raises:
        CutError: The number of ranks is not a power of two.
        ArgumentError: `input` is not P times as long as `output`, or a dtype is not supported.

    Example:
        >>> import torch
        >>> import isobit
        >>> from isobit.simulator import World
        >>> def scatter(rank):
        ...     share = torch.empty(1)
        ...     isobit.parallel.reduce_scatter(share, torch.tensor([1.0, 10.0]))
        ...     return share.item()
        >>> World(2).run(scatter).values
        [2.0, 20.0]
    """
    comms = _summing_communicators(group, input)
    _check_shares(output, input, rank_count(group))
    total, copy_back = _flatten(output, read=False)
    transfer = scatter_over(comms, input.detach().contiguous().view(-1), total)
    return _launch(transfer, copy_back, output, comms[0], async_op)


def all_gather(
    output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False
) -> AsyncWork | None:
    """Concatenate all ranks' tensors in rank order. Bytes are moved; nothing is added.

    Args:
        output: Receives all tensors, one after another. # [ranks * numel]
        input: This rank's tensor, of any dtype. # [numel]
        group: A process group of any size, or `Levels`; None is the default group.
        async_op: Return a work at once instead of waiting.

    Returns:
        None, or with `async_op` a work whose `wait()` returns when `output` is complete.

    Raises:
        ArgumentError: `output` is not P times as long as `input`, or dtypes or devices differ.

    Example:
        >>> import torch
        >>> import isobit
        >>> from isobit.simulator import World
        >>> def gather(rank):
        ...     everyone = torch.empty(2, dtype=torch.int64)
        ...     isobit.parallel.all_gather(everyone, torch.tensor([rank]))
        ...     return everyone.tolist()
        >>> World(2).run(gather).values
        [[0, 1], [0, 1]]
    """
    comms = [communicator_of(one) for one in _process_groups(group)]
    _check_shares(input, output, rank_count(group))
    whole, copy_back = _flatten(output, read=False)
    transfer = gather_over(comms, input.detach().contiguous().view(-1), whole)
    return _launch(transfer, copy_back, output, comms[0], async_op)


def _launch(
    transfer: Transfer,
    copy_back: Callable[[], None] | None,
    result: Tensor,
    comm: Communicator,
    async_op: bool,
) -> AsyncWork | None:
    in_thread = async_op and transfer.runs_in_thread

    @subnormals_kept()
    def finish() -> None:
        if in_thread:
            transfer.start()
        transfer.finish()
        if copy_back is not None:
            copy_back()

    # In the thread, a collective starts when the one before it has finished, so that concurrent
    # collectives need the receive buffer of one.
    if not in_thread:
        transfer.start()
    if async_op:
        return AsyncWork(finish, result, comm if in_thread else None)
    finish()
    return None


def _flatten(tensor: Tensor, read: bool = True) -> tuple[Tensor, Callable[[], None] | None]:
    """Return the elements as a 1-D tensor and, if that is a copy, a function to copy them back."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    flat = plain.contiguous().view(-1) if read else plain.new_empty(plain.numel())

    def copy_back() -> None:
        plain.copy_(flat.view(plain.shape))

    return flat, copy_back


def _process_groups(group: Group) -> Sequence[dist.ProcessGroup]:
    """Return the process groups of a sum, the innermost first."""
    if isinstance(group, Levels):
        return group.groups
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(
            expected="a process group that this rank is part of",
            received="no default group" if group is None else repr(group),
            remedy="call torch.distributed.init_process_group, or new_group with this rank in it",
        )
    return [found]


def _summing_communicators(group: Group, tensor: Tensor) -> list[Communicator]:
    comms = [communicator_of(one) for one in _process_groups(group)]
    comm = comms[0]
    if not isinstance(group, Levels) and comm.ranks & (comm.ranks - 1):
        raise CutError(
            expected="a group of 2^n ranks, since ranks are the leaves of a balanced tree",
            received=f"{comm.ranks} ranks",
            remedy=f"form groups of {1 << comm.ranks.bit_length() - 1} ranks",
        )
    refuse_distributed("the tensor", tensor)
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            expected="fp32 or fp64 partial sums, which are rounded once after the last addition",
            received=str(tensor.dtype),
            remedy="pass tensor.float() and round the sum; for integers call "
            "torch.distributed.all_reduce, since their addition has no order",
        )
    return comms


def _check_shares(share: Tensor, whole: Tensor, ranks: int) -> None:
    if (
        share.numel() * ranks != whole.numel()
        or share.dtype != whole.dtype
        or share.device != whole.device
    ):
        raise ArgumentError(
            expected=f"a share and a whole of {ranks} such shares, of one dtype and device",
            received=f"{list(share.shape)} of {share.dtype} and "
            f"{list(whole.shape)} of {whole.dtype}",
            remedy="pad the whole to a multiple of the number of ranks",
        )


# All-reduce of many tensors in a few buckets, each launched as soon as it is full.

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
