"""Rows that go to the rank of their expert and back (all-to-all), where each rank has tokens of its own.

[Note: rows of several ranks]
A rank sends its dispatched rows in the order of expert, sample and position. The owner of an expert sorts what it
receives by expert, then by rank: the ranks have consecutive shares of the global batch, so this is the order of the
rows in one batch, and not that of arrival. A product's row does not depend on other rows, and the gradient of an
expert's weight is the sum over the samples of all ranks that `isobit.grouped_linear` computes on one rank. Outputs
return to the rank of their token, where `isobit.combine` adds them by ascending expert; nothing is added on the way.

The gradient is that of the shares of all ranks of the group, which `isobit.parallel.Gradients` merges as one subtree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobit.errors import CutError, UnsupportedError
from isobit.ops.derivatives import refuse_second_order
from isobit.ops.experts.routes import Routes, expert_spans
from isobit.ops.experts.rows import combine, dispatch_rows
from isobit.ops.share import Share, collecting, share_in_force
from isobit.order.samples import Samples
from isobit.parallel.tensor.shard import shards_of, split_module, tp_group_of
from isobit.parallel.tensor.tensor_parallel_group import TensorParallelGroup

_EXCHANGE = "_isobit_exchange"  # on a parameter of experts: the ranks whose rows it is applied to
Compute = Callable[[Tensor, Routes], Tensor]


def exchange_of(parameter: Tensor) -> TensorParallelGroup | None:
    """Return the ranks that exchange rows with the owner of this parameter of experts, or None."""
    found: TensorParallelGroup | None = getattr(parameter, _EXCHANGE, None)
    return None if found is None or found.size == 1 else found


def split_experts(module: nn.Module, names: list[str], ranks: TensorParallelGroup) -> None:
    """Keep this rank's experts of each named parameter [E, …]; calls exchange rows from now on.

    Raises:
        CutError: The number of ranks does not divide the experts.
    """
    split_module(module, dict.fromkeys(names, 0), ranks)
    module.__dict__[_EXCHANGE] = ranks
    mark_exchanges(module)


def mark_exchanges(model: nn.Module) -> None:
    """Mark the parameters of experts that are split: a deep copy of a parameter has no mark, that of a module has."""
    for module in model.modules():
        if _EXCHANGE in module.__dict__ and tp_group_of(module) is not None:
            for name in shards_of(module):
                setattr(getattr(module, name), _EXCHANGE, module.__dict__[_EXCHANGE])


def mix_experts(
    x: Tensor, routes: Routes, compute: Compute, ranks: TensorParallelGroup | None
) -> Tensor:
    """Return each token's sum of its experts' outputs.

    Args:
        x: This rank's tokens, [..., n].
        routes: Their routes, to the experts of all ranks.
        compute: Returns the outputs of rows and of the routes that say which expert each belongs to.
        ranks: The ranks that the experts are split over; None if they are all here.
    """
    rows = dispatch_rows(x, routes)
    if ranks is None or ranks.size == 1:
        return combine(compute(rows, routes), routes)
    move = plan_move(rows, routes, ranks)
    arrived: Tensor = Send.apply(rows, move)  # type: ignore[no-untyped-call]
    with nullcontext() if move.share is None else collecting(move.share):
        made = compute(arrived, move.routes)
    returned: Tensor = Return.apply(made, move)  # type: ignore[no-untyped-call]
    return combine(returned, routes)


@dataclass(frozen=True)
class Move:
    """Which rows go to which rank, and the order of those that arrive."""

    ranks: TensorParallelGroup
    leaving: Tensor  # [R]: this rank's rows in the order in which they are sent
    sent: list[int]  # rows per destination
    received: list[int]  # rows per source
    order: Tensor  # [arrived rows]: what arrived, by expert and then by source
    routes: Routes  # of the rows that arrived, for isobit.grouped_linear
    share: Share | None  # the samples of all ranks, while a share is collected

    def send(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts."""
        return self._pass(rows[self.leaving], self.sent, self.received)[self.order]

    def give_back(self, rows: Tensor) -> Tensor:
        """Return what `send` sent, after it came back, in the order that it had."""
        arrived = torch.empty_like(rows)
        arrived[self.order] = rows
        back = self._pass(arrived, self.received, self.sent)
        found = torch.empty_like(back)
        found[self.leaving] = back
        return found

    def check_backward(self) -> None:
        """Raise for gradients that nobody collects: those of this rank's experts are of all ranks' tokens."""
        if torch.is_grad_enabled():
            refuse_second_order("parallel.ExpertParallel")()
        if self.share is None:
            raise UnsupportedError(
                expected="gradients of experts that are split over ranks inside isobit.parallel.Gradients",
                received="a backward outside of a micro-batch, or of another one's outputs",
                remedy="train through isobit.parallel.Gradients, on all ranks of the group",
            )

    def _pass(self, rows: Tensor, out: list[int], into: list[int]) -> Tensor:
        # As bytes: backends know few dtypes, and a NaN keeps its bits.
        given = rows.contiguous().view(torch.uint8)
        taken = given.new_empty(sum(into), given.shape[1])
        dist.all_to_all_single(taken, given, into, out, group=self.ranks.group)
        return taken.view(rows.dtype)


class Send(torch.autograd.Function):
    """Moves rows to the ranks of their experts; gradients come back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move) -> Tensor:
        """Return the rows that arrive."""
        ctx.move = move
        return move.send(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of this rank's rows."""
        ctx.move.check_backward()
        return ctx.move.give_back(grad), None


class Return(torch.autograd.Function):
    """Moves outputs back to the ranks of their tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move) -> Tensor:
        """Return the outputs of this rank's rows."""
        ctx.move = move
        return move.give_back(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of what this rank computed."""
        ctx.move.check_backward()
        return ctx.move.send(grad), None


def plan_move(rows: Tensor, routes: Routes, ranks: TensorParallelGroup) -> Move:
    """Tell each rank how many rows of each expert and sample it gets, and plan where they go."""
    own = check_count(routes.total, ranks)
    samples, share = routes.samples, share_in_force()
    trains = torch.is_grad_enabled() and share is not None
    facts = [len(samples.spans), samples.first, samples.total, rows.shape[1], int(trains)]
    everyone = ranks.all_gather(torch.tensor([*facts, rows.element_size()])).tolist()
    wide = joint_share(everyone, share) if any(each[4] for each in everyone) else None
    check_columns(everyone)

    spans = expert_spans(routes.tokens, routes.rows, samples)  # [E, samples, 2]
    counts = spans[..., 1].contiguous()  # [E, samples]
    before = torch.tensor([first for first, _ in routes.bounds]).unsqueeze(1)
    leaving = places((before + spans[..., 0]).flatten(), counts.flatten())
    told = [own * each[0] for each in everyone]
    heard = torch.empty(sum(told), dtype=torch.int64)
    same = [own * counts.shape[1]] * ranks.size
    dist.all_to_all_single(heard, counts.flatten(), told, same, group=ranks.group)
    by_rank = [
        part.view(own, -1) for part in torch.split(heard, told)
    ]  # each [own, samples of a rank]

    sizes = torch.stack([part.sum(1) for part in by_rank])  # [ranks, own]
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view(sizes.shape)
    return Move(
        ranks,
        leaving,
        counts.view(ranks.size, -1).sum(1).tolist(),
        sizes.sum(1).tolist(),
        places(starts.t().flatten(), sizes.t().flatten()),
        routes_here(torch.cat(by_rank, 1), wide),
        wide,
    )


def places(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the indices of runs, one after another: `lengths[i]` from `starts[i]` on."""
    offsets = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(offsets, lengths) + torch.arange(int(lengths.sum()))


def routes_here(counts: Tensor, share: Share | None) -> Routes:
    """Return the routes of rows that arrived, from the rows of each expert and sample, [own, samples].

    Rows are numbered as tokens inside their sample, as many as its busiest expert has: what is read of them is how many
    rows of a sample each expert has.
    """
    own, count = counts.shape
    longest = counts.amax(0) if own else counts.sum(0)
    first = longest.cumsum(0) - longest
    spans = tuple(zip(first.tolist(), longest.tolist(), strict=True))
    tokens = places(first.repeat(own), counts.flatten())
    at, total = (0, count) if share is None else (share.first, share.total)
    known = Samples(spans, int(longest.sum()), at, total)
    none = tokens.new_empty(0, 1)
    rows = tuple(counts.sum(1).tolist())
    return Routes(own, known, none, tokens, none, rows, none.float())


def check_count(total: int, ranks: TensorParallelGroup) -> int:
    """Return how many experts a rank has.

    Raises:
        CutError: The number of ranks does not divide the experts.
    """
    if total % ranks.size:
        raise CutError(
            expected=f"a number of ranks that divides {total} experts",
            received=f"{ranks.size} ranks",
            remedy="use fewer ranks along this mesh axis",
        )
    return total // ranks.size


def joint_share(everyone: list[list[int]], share: Share | None) -> Share:
    """Return the samples of all ranks, as one share.

    Every rank has the same facts, so that all of them raise.

    Raises:
        UnsupportedError: Ranks do not all train, or their shares do not follow each other.
    """
    size, first, total = everyone[0][:3]
    expected = [[size, first + at * size, total, 1] for at in range(len(everyone))]
    if [[*each[:3], each[4]] for each in everyone] != expected or share is None:
        found = [
            f"{each[1]} to {each[1] + each[0]}{'' if each[4] else ' without gradients'}"
            for each in everyone
        ]
        raise UnsupportedError(
            expected="consecutive shares of one global batch on the ranks that exchange rows of experts",
            received=f"samples {', '.join(found)}, by rank",
            remedy="train through isobit.parallel.Gradients with GlobalBatch(…, order='micro'), on all ranks of the "
            "group at once",
        )
    return share.of_group(first, size * len(everyone))


def check_columns(everyone: list[list[int]]) -> None:
    """Raise on every rank if rows have different widths or dtypes."""
    kinds = {(each[3], each[5]) for each in everyone}
    if len(kinds) > 1:
        raise UnsupportedError(
            expected="tokens of one width and dtype on all ranks",
            received=f"(columns, bytes per element) {sorted(kinds)}",
            remedy="run the same model on every rank",
        )
