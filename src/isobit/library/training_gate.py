"""Claims of distributed-training-v1: one training run in many layouts; planted wrong merges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isobit import optim
from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.gates.training import train_isobit
from isobit.gates.training.launcher import Job
from isobit.gates.training.rank_layout_gate import Outcome, run_jobs
from isobit.gates.training.workload import RankLayout, find_workload
from isobit.library.claims import replaced
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives import transfers
from isobit.parallel.data import reducer
from isobit.parallel.tensor import context_attention, expert_exchange

WORKLOAD = "tiny"
LAYOUTS = (
    RankLayout(1, 1, 1),
    RankLayout(1, 8, 1),
    RankLayout(4, 2, 1),
    RankLayout(2, 2, 2),
    RankLayout(2, 4, 1, "ddp"),
    RankLayout(4, 2, 1, "fsdp2"),
)
MIXTURE = "moe"  # the workload with experts
MIXTURES = (
    RankLayout(1, 1, 1),
    RankLayout(1, 4, 1),
    RankLayout(2, 2, 1, experts=2),
    RankLayout(4, 1, 1, experts=2),
    RankLayout(4, 1, 1, experts=4),
    RankLayout(1, 1, 1, context=2),
    RankLayout(1, 1, 1, context=4),
    RankLayout(2, 2, 1, experts=2, context=2),
)
Subject = Callable[[Tensor], Iterable[Outcome]]


def workload_of(drawn: Tensor) -> str:
    """Return which model is trained: the dense one for 8 drawn values, a mixture of experts for others."""
    return WORKLOAD if len(drawn) == 8 else MIXTURE


def by_isobit(drawn: Tensor) -> tuple[Outcome, ...]:
    """Return the run in every layout, in the dtype of `drawn`."""
    return run_all(drawn.dtype, workload_of(drawn))


@lru_cache(maxsize=4)  # two claims need the same run
def run_all(dtype: torch.dtype, workload: str) -> tuple[Outcome, ...]:
    """Return the outcome of every layout."""
    return tuple(run_layouts(dtype, workload))


def by_stock(drawn: Tensor) -> Iterator[Outcome]:
    """Yield the same layouts by stock PyTorch, which has none that share attention."""
    return run_each(drawn, stock=True)


def run_each(drawn: Tensor, stock: bool = False) -> Iterator[Outcome]:
    """Yield one layout after the other, so that a caller may stop at the first difference."""
    return run_layouts(drawn.dtype, workload_of(drawn), stock)


def run_layouts(dtype: torch.dtype, workload: str, stock: bool = False) -> Iterator[Outcome]:
    """Yield the outcome of each layout of a workload."""
    name = str(dtype).removeprefix("torch.")
    for layout in MIXTURES if workload == MIXTURE else LAYOUTS:
        if stock and layout.context > 1:
            continue
        with torch.enable_grad():
            (outcome,) = run_jobs([Job(layout, workload, name, stock)])
        yield outcome


def one_curve(subject: Subject, case: Case, tally: Tally) -> None:
    """DIST-002 at zero: every loss and norm of every step has the first layout's bits."""
    first: Outcome | None = None
    for outcome in subject(case.arguments["drawn"]):
        first = first or outcome
        tally.count(find_workload(WORKLOAD).samples)
        ours, theirs = ((*o.curve.losses, *o.curve.norms) for o in (first, outcome))
        tally.compared += len(theirs)
        differ = sum(a.hex() != b.hex() for a, b in zip(ours, theirs, strict=True))  # +0 is not -0
        if differ or not theirs:
            where = f"{outcome.name}: {differ} of {len(theirs)} losses and norms"
            tally.fail(f"{where} are not {first.name}'s", differ or 1)
            return


def one_digest(subject: Subject, case: Case, tally: Tally) -> None:
    """DIST-001: weights, gradients and optimizer state agree in every bit, are finite, and have changed."""
    first: Outcome | None = None
    drawn = case.arguments["drawn"]
    for outcome in subject(drawn):
        first = first or outcome
        curve = outcome.curve
        tally.count(find_workload(workload_of(drawn)).samples)
        tally.compared += 4 * curve.parameters
        if not (curve.finite and curve.changed and curve.parameters):
            found = f"finite {curve.finite}, changed {curve.changed}, of {curve.parameters}"
            tally.fail(f"{outcome.name}: {found}")
        for kind in ("weights", "gradients", "optimizer"):
            if getattr(curve, kind) != getattr(first.curve, kind):
                tally.fail(f"{outcome.name}: {kind} are not those of {first.name}")
        if tally.differing:
            return


# ---- planted --------------------------------------------------------------------------------------------


def with_left_fold(drawn: Tensor) -> Iterator[Outcome]:
    """Add micro-batches one after another, as autograd does."""

    class Fold(Counter[Any]):
        def push(self, node: Node, value: Any) -> None:
            if self:
                ((first, total),) = self
                self.clear()
                node, value = covering(first, node), total.add_(value)
            self.append((node, value))

    with replaced(reducer, "Counter", Fold):
        yield from run_each(drawn)


def covering(first: Node, last: Node) -> Node:
    """Return the smallest node above both."""
    while last.first > first.first:
        last = last.parent
    return last


def with_rounded_partials(drawn: Tensor) -> Iterator[Outcome]:
    """Round a micro-batch's gradient to bf16 before it is merged."""

    class Rounded(Counter[Any]):
        def push(self, node: Any, value: Any) -> None:
            super().push(node, value.bfloat16().float())

    with replaced(reducer, "Counter", Rounded):
        yield from run_each(drawn)


def with_mean_of_means(drawn: Tensor) -> Iterator[Outcome]:
    """Divide each micro-batch by its own count, then by their number: wrong for unequal samples."""
    right = train_isobit.share_loss

    def wrong(found: Tensor, rows: Any, active: int, shares: int) -> Tensor:
        return right(found, rows, rows.active * shares, shares)

    with replaced(train_isobit, "share_loss", wrong):
        yield from run_each(drawn)


def with_fold_by_rank(drawn: Tensor) -> Iterator[Outcome]:
    """Add ranks one after the other."""

    def wrong(rows: Sequence[Tensor], total: Tensor) -> None:
        total.copy_(reduce(torch.add, rows))

    with replaced(transfers, "add_rows", wrong):
        yield from run_each(drawn)


def with_local_norm(drawn: Tensor) -> Iterator[Outcome]:
    """Clip by the norm of a tensor-parallel rank's own shard."""

    def wrong(model: Any, most: float, **_: Any) -> Tensor:
        own = [p for p in model.parameters() if not isinstance(p, DTensor)]
        return optim.clip_grad_norm_(own, most)

    with replaced(train_isobit, "clip_grad_norm_", wrong):
        yield from run_each(drawn)


def with_idle_optimizer(drawn: Tensor) -> Iterator[Outcome]:
    """Train at a rate of 0: all layouts agree, since nothing changes."""
    with replaced(train_isobit, "AdamW", lambda parameters, **_: optim.AdamW(parameters, lr=0.0)):
        yield from run_each(drawn)


def with_loss_of_nan(drawn: Tensor) -> Iterator[Outcome]:
    """Make every loss NaN: all layouts agree, and nothing is finite."""
    right = train_isobit.share_loss
    with replaced(train_isobit, "share_loss", lambda *given: right(*given) * float("nan")):
        yield from run_each(drawn)


def with_rows_as_they_arrive(drawn: Tensor) -> Iterator[Outcome]:
    """Keep rows of experts in the order in which ranks sent them, and not by expert."""
    right = expert_exchange.plan_move

    def wrong(*given: Any) -> Any:
        made = right(*given)
        return replace(made, order=made.order.sort().values)

    with replaced(expert_exchange, "plan_move", wrong):
        yield from run_each(drawn)


def with_samples_joined(drawn: Tensor) -> Iterator[Outcome]:
    """Add an expert's rows of all samples in one run, as a product over all rows does."""
    right = expert_exchange.routes_here

    def wrong(*given: Any) -> Any:
        made = right(*given)
        known = made.samples
        joined = ((0, known.rows), *[(0, 0)] * (len(known.spans) - 1))
        return made._replace(samples=replace(known, spans=joined))

    with replaced(expert_exchange, "routes_here", wrong):
        yield from run_each(drawn)


def with_queries_in_other_places(drawn: Tensor) -> Iterator[Outcome]:
    """Let a rank that shares attention see one key less than its queries have."""
    right = context_attention.own_queries

    def wrong(*given: Any) -> Any:
        spans, table = right(*given)
        table.lengths = torch.maximum(table.lengths - 1, spans[:, 1])
        return spans, table

    with replaced(context_attention, "own_queries", wrong):
        yield from run_each(drawn)
