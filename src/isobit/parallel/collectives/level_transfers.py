"""The transfers of a sum or an all-gather over communicators, one per level: [Note: levels].

A flat group is one level. Each function takes the communicators innermost first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.parallel.collectives.all_to_all import AllToAllReduce, TorchAllGather
from isobit.parallel.collectives.communicator import Communicator
from isobit.parallel.collectives.recursive_halving import bit_reversed_spans, equal_spans
from isobit.parallel.collectives.send_recv import (
    RecursiveDoublingGather,
    RecursiveDoublingReturn,
    RecursiveHalvingReduce,
)
from isobit.parallel.collectives.transfer import LocalCopy, LocalRound, Sequential, Transfer


def reduce_over(
    comms: Sequence[Communicator], flat: Tensor, rounded: Tensor | None = None
) -> Transfer:
    """All-reduce: scatter inside, all-reduce across, gather inside.

    [Note: rounding before the return]
    Partial sums are fp32, and rounding one of them would change the sum. A complete sum is rounded
    once, by whoever has it, with the same bits. So its owner rounds it, and 16-bit parameters need
    half the bytes on the way back: 3/4 of an fp32 all-reduce, 3/2 of one that adds in 16 bits.

    Args:
        comms: One communicator per level, innermost first.
        flat: This rank's addends; receives the sums if `rounded` is None, else overwritten.
        rounded: Receives the sums in its own, narrower dtype. # [numel]
    """
    levels = [comm for comm in comms if comm.ranks > 1]
    if not flat.numel():
        return Sequential()
    if not levels:
        return Sequential() if rounded is None else LocalRound(flat, rounded)
    inner, outer = levels[0], levels[1:]
    if inner.uses_send_recv(flat):
        owned = bit_reversed_spans(flat.numel(), inner.ranks)
        mine = slice(owned[inner.rank].start, owned[inner.rank].stop)
        across = reduce_over(outer, flat[mine], None if rounded is None else rounded[mine])
        returned = RecursiveDoublingReturn(inner, flat if rounded is None else rounded, owned)
        return Sequential(RecursiveHalvingReduce(inner, flat, flat, owned), across, returned)
    if not outer and rounded is None:
        return AllToAllReduce(inner, flat, None)
    return _reduce_shares(levels, flat, rounded)


def _reduce_shares(
    levels: Sequence[Communicator], flat: Tensor, rounded: Tensor | None
) -> Transfer:
    """All-reduce by collectives in shares of one size."""
    inner, outer = levels[0], levels[1:]
    padding = -flat.numel() % math.prod(comm.ranks for comm in levels)
    whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    target = flat if rounded is None else rounded
    share = whole.new_empty(whole.numel() // inner.ranks)
    sent = share if rounded is None else rounded.new_empty(share.numel())
    gathered = target.new_empty(whole.numel()) if padding else target
    stages = [
        AllToAllReduce(inner, whole, share),
        reduce_over(outer, share, None if rounded is None else sent),
        TorchAllGather(inner, sent, gathered),
    ]
    return Sequential(*stages, *([LocalCopy(gathered[: flat.numel()], target)] if padding else []))


def scatter_over(comms: Sequence[Communicator], flat: Tensor, total: Tensor) -> Transfer:
    """Reduce-scatter: the r-th share of the sum to rank r of the flat group.

    An inner rank needs the shares of its place on all hosts, which are not contiguous. So the input
    is copied once, from [outermost, …, innermost, share] to [innermost, …, outermost, share].
    """
    levels = [comm for comm in comms if comm.ranks > 1]
    if not levels or not flat.numel():
        return LocalCopy(flat, total)
    if len(levels) > 1:
        flat = _turned(flat, [comm.ranks for comm in reversed(levels)])
    stages: list[Transfer] = []
    for at, comm in enumerate(levels):
        part = total if at + 1 == len(levels) else flat.new_empty(flat.numel() // comm.ranks)
        stages += _scatter(comm, flat, part)
        flat = part
    return Sequential(*stages)


def _scatter(comm: Communicator, flat: Tensor, total: Tensor) -> list[Transfer]:
    if not comm.uses_send_recv(flat):
        return [AllToAllReduce(comm, flat, total)]
    sums, owned = torch.empty_like(flat), equal_spans(flat.numel(), comm.ranks)
    mine = sums[owned[comm.rank].start : owned[comm.rank].stop]
    return [RecursiveHalvingReduce(comm, flat, sums, owned), LocalCopy(mine, total)]


def gather_over(comms: Sequence[Communicator], share: Tensor, whole: Tensor) -> Transfer:
    """All-gather in the flat group's order, the outermost level first: it has the shortest runs."""
    levels = [comm for comm in comms if comm.ranks > 1]
    if not levels or not share.numel():
        return LocalCopy(share, whole)
    if len(levels) == 1:
        return _gather(levels[0], share, whole)
    stages: list[Transfer] = []
    for comm in reversed(levels):
        gathered = share.new_empty(share.numel() * comm.ranks)
        stages.append(_gather(comm, share, gathered))
        share = gathered
    sizes = [comm.ranks for comm in levels]
    back = share.view(*sizes, -1).permute(*reversed(range(len(sizes))), len(sizes))
    return Sequential(*stages, LocalCopy(back, whole.view(back.shape)))


def _gather(comm: Communicator, share: Tensor, whole: Tensor) -> Transfer:
    doubles = comm.uses_send_recv(share) and not comm.ranks & (comm.ranks - 1)
    return (RecursiveDoublingGather if doubles else TorchAllGather)(comm, share, whole)


def _turned(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a copy with the axes `sizes` of a flat tensor in the reverse order."""
    axes = [*reversed(range(len(sizes))), len(sizes)]
    return flat.view(*sizes, -1).permute(axes).contiguous().view(-1)
