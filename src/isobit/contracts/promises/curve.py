"""What distributed-training-v1 claims: one training run in many layouts, and planted wrong merges inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.contracts.recipes import Case
from isobit.contracts.tally import Tally
from isobit.curve import train
from isobit.curve.gate import Outcome, run_jobs
from isobit.curve.launch import Job
from isobit.curve.layouts import Layout
from isobit.curve.workload import find_workload
from isobit.order.tree import Counter
from isobit.parallel import exchange, partials

WORKLOAD = "tiny"
LAYOUTS = (
    Layout(1, 1, 1),
    Layout(1, 8, 1),
    Layout(2, 2, 2),
    Layout(4, 2, 1),
    Layout(4, 1, 2),
    Layout(8, 1, 1),
    Layout(2, 4, 1, "ddp"),
    Layout(4, 2, 1, "fsdp2"),
)
Subject = Callable[[Tensor], tuple[Outcome, ...]]


def by_isobit(drawn: Tensor) -> tuple[Outcome, ...]:
    """The run in every layout, in the dtype that was drawn."""
    return run_all(drawn.dtype)


@lru_cache(maxsize=2)  # two claims ask for the same run
def run_all(dtype: torch.dtype) -> tuple[Outcome, ...]:
    with torch.enable_grad():
        return tuple(run_jobs(Job(layout, WORKLOAD, name_of(dtype)) for layout in LAYOUTS))


def by_stock(drawn: Tensor) -> tuple[Outcome, ...]:
    """The same layouts by stock PyTorch."""
    with torch.enable_grad():
        return tuple(run_jobs(Job(layout, WORKLOAD, name_of(drawn.dtype), stock=True) for layout in LAYOUTS))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def one_curve(subject: Subject, case: Case, tally: Tally) -> None:
    """DIST-002 at zero: every loss and norm of every step has the first layout's bits."""
    first, *others = found = subject(case.arguments["drawn"])
    tally.count(find_workload(WORKLOAD).samples * len(found))
    for other in others:
        pairs = zip((*first.curve.losses, *first.curve.norms), (*other.curve.losses, *other.curve.norms), strict=True)
        tally.compared += len(first.curve.losses) + len(first.curve.norms)
        differ = sum(a != b for a, b in pairs)
        if differ:
            tally.fail(f"{other.name}: {differ} losses and norms are not those of {first.name}", differ)
    if not first.curve.losses:
        tally.fail("no step was taken")


def one_digest(subject: Subject, case: Case, tally: Tally) -> None:
    """DIST-001: weights, gradients and optimizer state agree in every bit, are finite, and have changed."""
    first, *others = found = subject(case.arguments["drawn"])
    tally.count(find_workload(WORKLOAD).samples * len(found))
    for outcome in found:
        tally.compared += 4 * outcome.curve.parameters
        if not (outcome.curve.finite and outcome.curve.changed and outcome.curve.parameters):
            tally.fail(f"{outcome.name}: finite {outcome.curve.finite}, changed {outcome.curve.changed}")
    for other in others:
        for kind in ("weights", "gradients", "optimizer"):
            if getattr(other.curve, kind) != getattr(first.curve, kind):
                tally.fail(f"{other.name}: {kind} are not those of {first.name}")


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


def with_left_fold(drawn: Tensor) -> tuple[Outcome, ...]:
    """Micro-batches added as they come, which is what autograd does."""

    class Fold(Counter[Any]):
        def push(self, node: Any, value: Any) -> None:
            if not self:
                self.append((node, value))
                return
            ((first, total),) = self
            self[:] = [(first, total.add_(value))]
            self[0] = (covering(first, node), self[0][1])

    with planted(partials, "Counter", Fold):
        return run_all.__wrapped__(drawn.dtype)


def covering(first: Any, last: Any) -> Any:
    """The node over both, once the run between them is a subtree; until then the first, one level up."""
    node = last
    while node.first > first.first:
        node = node.parent
    return node


def with_rounded_partials(drawn: Tensor) -> tuple[Outcome, ...]:
    """A micro-batch's gradient rounded to bf16 before it is merged."""

    class Rounded(Counter[Any]):
        def push(self, node: Any, value: Any) -> None:
            super().push(node, value.bfloat16().float())

    with planted(partials, "Counter", Rounded):
        return run_all.__wrapped__(drawn.dtype)


def with_mean_of_means(drawn: Tensor) -> tuple[Outcome, ...]:
    """Each micro-batch divided by its own count, then by the number of them: wrong where samples are unequal."""
    right = train.share_loss

    def wrong(found: Tensor, rows: Any, active: int, shares: int) -> Tensor:
        own = int((rows.targets >= 0).sum())
        return right(found, rows, own * shares, shares)

    with planted(train, "share_loss", wrong):
        return run_all.__wrapped__(drawn.dtype)


def with_fold_by_rank(drawn: Tensor) -> tuple[Outcome, ...]:
    """Ranks added one after the other."""

    def wrong(rows: Any, *rest: Any) -> Any:
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total

    with planted(exchange, "sum_by_tree", wrong):
        return run_all.__wrapped__(drawn.dtype)


def with_local_norm(drawn: Tensor) -> tuple[Outcome, ...]:
    """Each tensor-parallel rank clips by the norm of its own shard."""
    right = train.clip_grad_norm_

    def wrong(parameters: Any, most: float, *, group: Any = None) -> Tensor:
        from isobit.optim import clip_grad_norm_

        return clip_grad_norm_(parameters.parameters(), most) if group is not None else right(parameters, most)

    with planted(train, "clip_grad_norm_", wrong):
        return run_all.__wrapped__(drawn.dtype)
