"""All-reduce, reduce-scatter and all-gather that own their order: rank r is leaf r of the balanced tree."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isobit.errors import ArgumentError, CutError
from isobit.parallel.movement import PIECE_BYTES, Collectives, Gather, Line, Messages, Piece, line_of

Move = Messages | Collectives | Gather


class Flight(dist.Work):
    """An exchange that runs on beside its caller; ends by itself on gloo, in wait() or get_future() elsewhere."""

    def __init__(self, finish: Callable[[], None], result: Tensor, line: Line | None) -> None:
        super().__init__()
        self._finish, self._result = finish, result
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._begun = line is not None
        if line is not None:
            line.run(self._run)

    def _run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the sum is in place; the transport's own timeout holds."""
        if not self._begun:
            self._begun = True
            self._run()
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether wait() would return at once."""
        return self._future.done()

    def result(self) -> list[Tensor]:
        """The tensor that holds the sum, as torch's own works give it."""
        self.wait()
        return [self._result]

    def get_future(self) -> torch.futures.Future[Any]:
        """For hooks of DistributedDataParallel: its value is the tensor."""
        if not self._begun:
            self.wait()
        return self._future


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> Flight | None:
    """The sum over the group's ranks, in place, added as ((0+1)+(2+3))+…"""
    line = _line(group, tensor)
    if line.ranks == 1 or not tensor.numel():
        return _launch(None, None, tensor, line, async_op)
    flat, back = _flatten(tensor)
    parts = list(torch.split(flat, _width(flat, line.ranks) * line.ranks))
    if line.has_messages(tensor):
        move: Move = Messages(line, [_cut(part, line) for part in parts], gather=True)
    else:
        move = Collectives(line, parts, None)
    return _launch(move, back, tensor, line, async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Flight | None:
    """The rank's own of P equal shares of the sum over ranks; `input` is left as it is."""
    line = _line(group, input)
    _check_shares(output, input, line.ranks)
    total, back = _flatten(output, read=False)
    flat = input.detach().reshape(-1)
    if line.ranks == 1 or not input.numel():
        output.detach().copy_(input.detach().view_as(output))
        return _launch(None, None, output, line, async_op)
    if line.has_messages(input):
        width = _width(input, line.ranks)
        blocks = torch.split(flat.view(line.ranks, -1), width, dim=1)
        pieces = [Piece(list(block), part) for block, part in zip(blocks, torch.split(total, width), strict=True)]
        move: Move = Messages(line, pieces, gather=False)
    else:
        move = Collectives(line, [flat], total)
    return _launch(move, back, output, line, async_op)


def all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> Flight | None:
    """Every rank's tensor, one after the other: bytes are moved, nothing is added; any dtype."""
    line = line_of(_group(group))
    _check_shares(input, output, line.ranks)
    flat, back = _flatten(output, read=False)
    mine = input.detach().reshape(-1)
    return _launch(Gather(line, mine, flat), back, output, line, async_op)


def _launch(
    move: Move | None, back: Callable[[], None] | None, result: Tensor, line: Line, async_op: bool
) -> Flight | None:
    beside = async_op and move is not None and move.runs_on

    def finish() -> None:
        if move is not None:
            if beside:
                move.start()
            move.finish()
        if back is not None:
            back()

    # On gloo the line's thread begins it in its turn, so that those in flight share the memory of one.
    if move is not None and not beside:
        move.start()
    if async_op:
        return Flight(finish, result, line if beside else None)
    finish()
    return None


def _width(tensor: Tensor, ranks: int) -> int:
    """Elements of one rank in a piece, the same on every rank."""
    return max(PIECE_BYTES // (tensor.element_size() * ranks), 1)


def _cut(part: Tensor, line: Line) -> Piece:
    """A part by rank; where P does not divide it, shares differ by one element and nothing is padded."""
    edges = [part.numel() * rank // line.ranks for rank in range(line.ranks + 1)]
    shares = [part[start:stop] for start, stop in pairwise(edges)]
    return Piece(shares, shares[line.rank])


def _flatten(tensor: Tensor, read: bool = True) -> tuple[Tensor, Callable[[], None] | None]:
    """The elements in a row, and how they go back where memory does not hold them so."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    flat = plain.reshape(-1) if read else plain.new_empty(plain.numel())

    def back() -> None:
        plain.copy_(flat.view(plain.shape))

    return flat, back


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    world = dist.group.WORLD
    if world is None:
        raise ArgumentError(
            expected="a process group",
            received="none in this process",
            remedy="call torch.distributed.init_process_group",
        )
    return world


def _line(group: dist.ProcessGroup | None, tensor: Tensor) -> Line:
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
    if part.numel() * ranks != whole.numel() or part.dtype != whole.dtype or part.device != whole.device:
        raise ArgumentError(
            expected=f"a share and a whole of {ranks} such shares, of one dtype and device",
            received=f"{list(part.shape)} of {part.dtype} and {list(whole.shape)} of {whole.dtype}",
            remedy="pad the whole to a multiple of the ranks",
        )
