"""The public all-reduce, reduce-scatter and all-gather: rank r is leaf r of a balanced tree.

The order of addition does not depend on the backend, the network, message sizes or which rank is
ready first. It is described in [Note: the reduction tree over ranks] (recursive_halving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError, CutError
from isobit.ops.arguments import refuse_distributed
from isobit.parallel.collectives.async_work import AsyncWork
from isobit.parallel.collectives.communicator import Communicator, communicator_of
from isobit.parallel.collectives.elementwise_add import subnormals_kept
from isobit.parallel.collectives.level_transfers import gather_over, reduce_over, scatter_over
from isobit.parallel.collectives.levels import Group, Levels, rank_count
from isobit.parallel.collectives.transfer import Transfer


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
