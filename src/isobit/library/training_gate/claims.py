"""What distributed-training-v1 claims: one training run in many layouts, and planted wrong merges inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from isobit.gates.training.rank_layouts import RankLayout
from isobit.gates.training.workload import find_workload
from isobit.order.tree import Counter, Node
from isobit.parallel.collectives import all_to_all
from isobit.parallel.data import partial_gradients

WORKLOAD = "tiny"
LAYOUTS = (
    RankLayout(1, 1, 1),
    RankLayout(1, 8, 1),
    RankLayout(4, 2, 1),
    RankLayout(2, 2, 2),
    RankLayout(2, 4, 1, "ddp"),
    RankLayout(4, 2, 1, "fsdp2"),
)
Subject = Callable[[Tensor], Iterable[Outcome]]


def by_isobit(drawn: Tensor) -> tuple[Outcome, ...]:
    """The run in every layout, in the dtype that was drawn."""
    return run_all(drawn.dtype)


@lru_cache(maxsize=2)  # two claims ask for the same run
def run_all(dtype: torch.dtype) -> tuple[Outcome, ...]:
    return tuple(run_each(dtype))


def by_stock(drawn: Tensor) -> Iterator[Outcome]:
    """The same layouts by stock PyTorch."""
    return run_each(drawn.dtype, stock=True)


def run_each(dtype: torch.dtype, stock: bool = False) -> Iterator[Outcome]:
    """One layout after the other, as they are asked for: who parts early need not go on."""
    name = str(dtype).removeprefix("torch.")
    for layout in LAYOUTS:
        with torch.enable_grad():
            (outcome,) = run_jobs([Job(layout, WORKLOAD, name, stock)])
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
            said = (
                f"{outcome.name}: {differ} of {len(theirs)} losses and norms are not {first.name}'s"
            )
            tally.fail(said, differ or 1)
            return


def one_digest(subject: Subject, case: Case, tally: Tally) -> None:
    """DIST-001: weights, gradients and optimizer state agree in every bit, are finite, and have changed."""
    first: Outcome | None = None
    for outcome in subject(case.arguments["drawn"]):
        first = first or outcome
        curve = outcome.curve
        tally.count(find_workload(WORKLOAD).samples)
        tally.compared += 4 * curve.parameters
        if not (curve.finite and curve.changed and curve.parameters):
            tally.fail(
                f"{outcome.name}: finite {curve.finite}, changed {curve.changed}, of {curve.parameters}"
            )
        for kind in ("weights", "gradients", "optimizer"):
            if getattr(curve, kind) != getattr(first.curve, kind):
                tally.fail(f"{outcome.name}: {kind} are not those of {first.name}")
        if tally.differing:
            return


# ---- planted --------------------------------------------------------------------------------------------


@contextmanager
def planted(home: Any, name: str, wrong: Any) -> Iterator[None]:
    """One part replaced, and put back."""
    right = getattr(home, name)
    setattr(home, name, wrong)
    try:
        yield
    finally:
        setattr(home, name, right)


def with_left_fold(drawn: Tensor) -> Iterator[Outcome]:
    """Micro-batches added as they come, which is what autograd does."""

    class Fold(Counter[Any]):
        def push(self, node: Node, value: Any) -> None:
            if self:
                ((first, total),) = self
                self.clear()
                node, value = covering(first, node), total.add_(value)
            self.append((node, value))

    with planted(partial_gradients, "Counter", Fold):
        yield from run_each(drawn.dtype)


def covering(first: Node, last: Node) -> Node:
    """The least node over both."""
    while last.first > first.first:
        last = last.parent
    return last


def with_rounded_partials(drawn: Tensor) -> Iterator[Outcome]:
    """A micro-batch's gradient rounded to bf16 before it is merged."""

    class Rounded(Counter[Any]):
        def push(self, node: Any, value: Any) -> None:
            super().push(node, value.bfloat16().float())

    with planted(partial_gradients, "Counter", Rounded):
        yield from run_each(drawn.dtype)


def with_mean_of_means(drawn: Tensor) -> Iterator[Outcome]:
    """Each micro-batch divided by its own count, then by the number of them: wrong where samples are unequal."""
    right = train_isobit.share_loss

    def wrong(found: Tensor, rows: Any, active: int, shares: int) -> Tensor:
        return right(found, rows, rows.active * shares, shares)

    with planted(train_isobit, "share_loss", wrong):
        yield from run_each(drawn.dtype)


def with_fold_by_rank(drawn: Tensor) -> Iterator[Outcome]:
    """Ranks added one after the other."""

    def wrong(rows: Sequence[Tensor], total: Tensor) -> None:
        total.copy_(reduce(torch.add, rows))

    with planted(all_to_all, "add_rows", wrong):
        yield from run_each(drawn.dtype)


def with_local_norm(drawn: Tensor) -> Iterator[Outcome]:
    """Each tensor-parallel rank clips by the norm of its own shard."""

    def wrong(model: Any, most: float, **_: Any) -> Tensor:
        return optim.clip_grad_norm_(
            [p for p in model.parameters() if not isinstance(p, DTensor)], most
        )

    with planted(train_isobit, "clip_grad_norm_", wrong):
        yield from run_each(drawn.dtype)


def with_idle_optimizer(drawn: Tensor) -> Iterator[Outcome]:
    """At a rate of 0 all layouts agree, since nothing moves."""
    with planted(train_isobit, "AdamW", lambda parameters, **_: optim.AdamW(parameters, lr=0.0)):
        yield from run_each(drawn.dtype)


def with_loss_of_nan(drawn: Tensor) -> Iterator[Outcome]:
    """Every layout has the same NaN everywhere."""
    right = train_isobit.share_loss
    with planted(train_isobit, "share_loss", lambda *given: right(*given) * float("nan")):
        yield from run_each(drawn.dtype)
