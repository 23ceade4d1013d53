"""What lm-head-kernel-v1 claims: a rollout that holds logits and a training step that never does have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.library.logprob import planted
from isobit.library.logprob.claims import Call, Score, drawn_targets, refuses_each
from isobit.machine import thread_count
from isobit.ops.linear.op import linear, linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.op import linear_logprob
from isobit.ops.portable.rounding import widen_rows
from isobit.ops.portable.sums import sum_products
from isobit.order.plan import FeaturePlan

Logits = Callable[[Tensor, Tensor], Tensor]
SIZES = (1, 3, 8, 64, 65)  # rows of a step of decoding
TEMPERATURES = (1.0, 0.7, 2.0)


@dataclass(frozen=True)
class Head:
    """A head of a language model: fp32 logits, as rollout samples from; and log-probabilities, as training has them."""

    logits: Logits
    score: Score

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self.logits(hidden, weight)

    def rollout(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """What a sampler knows of the token it took."""
        logits = self.logits(hidden, weight)
        if temperature != 1.0:
            logits = logits * (1.0 / torch.tensor(temperature))
        return log_softmax(logits).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def rollout_is_training(subject: Head, case: Case, tally: Tally) -> None:
    """A batch of training against steps of decoding of many sizes, at every temperature."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 70).clamp(min=0)
    tally.count(case.rows)
    for temperature in TEMPERATURES:
        trained = subject.score(hidden, weight, targets, temperature=temperature)
        at, step = 0, case.recipe.seed
        while at < case.rows:
            rows = slice(at, at + SIZES[step % len(SIZES)])
            found = subject.rollout(hidden[rows], weight, targets[rows], temperature)
            tally.same(found, trained[rows], f"rows from {at}, temperature {temperature}")
            at, step = rows.stop, step + 1


def packed_and_stored(subject: Head, case: Case, tally: Tally) -> None:
    """One equality whatever the shape, the storage and the threads of either side."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 72).clamp(min=0)
    tally.count(case.rows)
    whole = subject.rollout(hidden, weight, targets)
    for axis in (0, 1):
        found = subject.score(hidden.unsqueeze(axis), weight, targets.unsqueeze(axis))
        tally.same(found.squeeze(axis), whole, f"packed with an axis at {axis}")
    for name, store in LAYOUTS.items():
        tally.same(
            subject.score(store(hidden), store(weight), targets),
            whole,
            f"trained on what is stored {name}",
        )
        tally.same(
            subject.rollout(store(hidden), store(weight), targets),
            whole,
            f"rolled out, stored {name}",
        )
    for threads in THREADS:
        with thread_count(threads):
            tally.same(
                subject.score(hidden, weight, targets), whole, f"trained by {threads} threads"
            )
            tally.same(
                subject.rollout(hidden, weight, targets), whole, f"rolled out by {threads} threads"
            )


def rounds_to_linear(subject: Head, case: Case, tally: Tally) -> None:
    """Logits are fp32, and rounded to the dtype they are isobit.linear's."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    tally.count(case.rows)
    found = subject.logits(hidden, weight)
    tally.compared += 1
    if found.dtype != torch.float32 or found.requires_grad:
        tally.fail(f"{found.dtype} logits, gradient: {found.requires_grad}")
    tally.same(found.to(case.dtype), linear(hidden, weight), "rounded")


def executors_agree(subject: Head, case: Case, tally: Tally) -> None:
    """Logits have the portable executor's bits."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    tally.count(case.rows)
    segments = FeaturePlan(hidden.shape[1]).segments
    known = sum_products(segments, widen_rows(hidden), widen_rows(weight))[0]
    tally.same(subject.logits(hidden, weight), known, "logits")


def refuses(subject: Head, case: Case, tally: Tally) -> None:
    """Each call is refused with a remedy."""
    refuses_each(subject.logits, refused_calls(), tally)


def refused_calls() -> Iterator[Call]:
    """Calls that have no logits."""
    hidden, weight = torch.ones(2, 3), torch.ones(5, 3)
    yield "widths that differ", (hidden[:, :2], weight), {}
    yield "a weight that is a vector", (hidden, weight[0]), {}
    yield "two dtypes", (hidden.bfloat16(), weight), {}
    yield "integers", (hidden.int(), weight.int()), {}
    yield "a scalar", (torch.tensor(1.0), weight), {}


# ---- planted --------------------------------------------------------------------------------------------


def _stock_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float()


def _rounded_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Through bf16, as engines keep them."""
    return linear_fp32(hidden, weight).bfloat16().float()


def _few_otherwise(hidden: Tensor, weight: Tensor) -> Tensor:
    """Few rows take another kernel, as decoding does."""
    if hidden.shape[:-1].numel() >= 8:
        return linear_fp32(hidden, weight)
    return linear_fp32(hidden.flip(-1), weight.flip(-1))


def _widened_late(hidden: Tensor, weight: Tensor) -> Tensor:
    """Rounded to the dtype and widened again."""
    return linear(hidden, weight).float()


def _by_threads(hidden: Tensor, weight: Tensor) -> Tensor:
    """Words shared out with other sums."""
    return (
        linear_fp32(hidden, weight)
        if torch.get_num_threads() == 1
        else _stock_logits(hidden.float(), weight.float())
    )


def _without_the_last_feature(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_fp32(hidden[..., :-1], weight[:, :-1])


def _careless_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros(1)


ours = Head(linear_fp32, linear_logprob)
stock = Head(_stock_logits, planted.stock_score)
bf16_logits, decoding_otherwise = (
    replace(ours, logits=_rounded_logits),
    replace(ours, logits=_few_otherwise),
)
widened_late, by_threads = replace(ours, logits=_widened_late), replace(ours, logits=_by_threads)
careless, without_the_last_feature = (
    replace(ours, logits=f) for f in (_careless_logits, _without_the_last_feature)
)
temperature_after, neighbours_target, without_the_tail = (
    replace(ours, score=getattr(planted, name).score)
    for name in ("temperature_after", "neighbours_target", "without_the_tail")
)
