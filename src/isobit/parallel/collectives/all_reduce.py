"""All-reduce, reduce-scatter and all-gather that own their order: rank r is leaf r of the balanced tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError, CutError
from isobit.parallel.collectives.additions import subnormals_kept
from isobit.parallel.collectives.async_work import Flight
from isobit.parallel.collectives.group_state import Line, line_of
from isobit.parallel.collectives.hierarchy import TwoLevel
from isobit.parallel.collectives.recursive_halving import equal_spans, folded_spans
from isobit.parallel.collectives.transports import (
    Chain,
    Collectives,
    Doubling,
    Meetings,
    Move,
    Stock,
)

Group = dist.ProcessGroup | None


def all_reduce(
    tensor: Tensor, group: Group | TwoLevel = None, *, async_op: bool = False
) -> Flight | None:
    """The sum over the group's ranks, in place, added as ((0+1)+(2+3))+…"""
    if isinstance(group, TwoLevel):
        return _all_reduce_levels(tensor, group, async_op)
    line = _summing_line(group, tensor)
    flat, back = _flatten(tensor)
    return _launch(_reduce(line, flat), back, tensor, line, async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False
) -> Flight | None:
    """The rank's own of P equal shares of the sum over ranks; `input` is left as it is."""
    line = _summing_line(group, input)
    _check_shares(output, input, line.ranks)
    total, back = _flatten(output, read=False)
    return _launch(
        _scatter(line, input.detach().contiguous().view(-1), total), back, output, line, async_op
    )


def all_gather(
    output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False
) -> Flight | None:
    """Every rank's tensor, one after the other: bytes are moved, nothing is added; any dtype, any number of ranks."""
    line = line_of(_group(group))
    _check_shares(input, output, line.ranks)
    whole, back = _flatten(output, read=False)
    return _launch(
        _gather(line, input.detach().contiguous().view(-1), whole), back, output, line, async_op
    )


def _reduce(line: Line, flat: Tensor) -> Move:
    if line.ranks == 1 or not flat.numel():
        return Chain()
    if line.has_messages(flat):
        return Meetings(line, flat, flat, folded_spans(flat.numel(), line.ranks), gather=True)
    return Collectives(line, flat, None)


def _scatter(line: Line, flat: Tensor, total: Tensor) -> Move:
    if line.ranks == 1 or not flat.numel():
        return Copy(flat, total)
    if not line.has_messages(flat):
        return Collectives(line, flat, total)
    sums, owned = torch.empty_like(flat), equal_spans(flat.numel(), line.ranks)
    mine = sums[owned[line.rank].start : owned[line.rank].stop]
    return Chain(Meetings(line, flat, sums, owned, gather=False), Copy(mine, total))


def _gather(line: Line, share: Tensor, whole: Tensor) -> Move:
    if line.ranks == 1 or not share.numel():
        return Copy(share, whole)
    doubles = line.has_messages(share) and not line.ranks & (line.ranks - 1)
    return Doubling(line, share, whole) if doubles else Stock(line, share, whole)


def _all_reduce_levels(tensor: Tensor, levels: TwoLevel, async_op: bool) -> Flight | None:
    """Inside, across, inside again: the runs of consecutive ranks are subtrees, so the tree is the flat one."""
    inner, outer = (_summing_line(group, tensor) for group in (levels.inner, levels.outer))
    flat, back = _flatten(tensor)
    padding = -flat.numel() % inner.ranks
    whole = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
    share = whole.new_empty(whole.numel() // inner.ranks)
    moves = [_scatter(inner, whole, share), _reduce(outer, share), _gather(inner, share, whole)]
    if padding:
        moves.append(Copy(whole[: flat.numel()], flat))
    return _launch(Chain(*moves), back, tensor, inner, async_op)


class Copy:
    """From one place to another, on this rank."""

    runs_beside = True

    def __init__(self, source: Tensor, place: Tensor) -> None:
        self.source, self.place = source, place

    def start(self) -> None:
        """There is nothing to begin."""

    def finish(self) -> None:
        """Copies."""
        self.place.copy_(self.source)


def _launch(
    move: Move, back: Callable[[], None] | None, result: Tensor, line: Line, async_op: bool
) -> Flight | None:
    beside = async_op and move.runs_beside

    @subnormals_kept()
    def finish() -> None:
        if beside:
            move.start()
        move.finish()
        if back is not None:
            back()

    # On gloo the line's thread begins it in its turn, so that those in flight share the memory of one.
    if not beside:
        move.start()
    if async_op:
        return Flight(finish, result, line if beside else None)
    finish()
    return None


def _flatten(tensor: Tensor, read: bool = True) -> tuple[Tensor, Callable[[], None] | None]:
    """The elements in a row, and how they go back where memory does not hold them so."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    flat = plain.contiguous().view(-1) if read else plain.new_empty(plain.numel())

    def back() -> None:
        plain.copy_(flat.view(plain.shape))

    return flat, back


def _group(group: Group) -> dist.ProcessGroup:
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ArgumentError(
            expected="a process group that this rank is part of",
            received="none" if group is None else repr(group),
            remedy="call torch.distributed.init_process_group, or new_group with this rank in it",
        )
    return found


def _summing_line(group: Group, tensor: Tensor) -> Line:
    """The group's line, if it can carry the sum."""
    line = line_of(_group(group))
    if line.ranks & (line.ranks - 1):
        raise CutError(
            expected="a group whose size is a power of two, since ranks are leaves of a balanced tree",
            received=f"{line.ranks} ranks",
            remedy=f"form groups of {1 << line.ranks.bit_length() - 1} ranks",
        )
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(
            expected="partial sums of fp32 or fp64, which are rounded once, after the last addition",
            received=str(tensor.dtype),
            remedy="exchange tensor.float() and round the sum; for integers call torch.distributed.all_reduce, "
            "since their addition has no order",
        )
    return line


def _check_shares(part: Tensor, whole: Tensor, ranks: int) -> None:
    if (
        part.numel() * ranks != whole.numel()
        or part.dtype != whole.dtype
        or part.device != whole.device
    ):
        raise ArgumentError(
            expected=f"a share and a whole of {ranks} such shares, of one dtype and device",
            received=f"{list(part.shape)} of {part.dtype} and {list(whole.shape)} of {whole.dtype}",
            remedy="pad the whole to a multiple of the ranks",
        )
