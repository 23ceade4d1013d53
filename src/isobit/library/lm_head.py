"""Claims of lm-head-kernel-v1: a rollout that computes logits has the bits of a training step that does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.contracts.judge.transforms import LAYOUTS, THREADS
from isobit.foundation.machine import thread_count
from isobit.library import refused_calls
from isobit.library import stock as stock_functions
from isobit.library.claims import refuses_each
from isobit.library.logprob import planted
from isobit.library.logprob.claims import Score, drawn_targets
from isobit.ops.linear.op import linear, linear_fp32
from isobit.ops.log_softmax.op import log_softmax
from isobit.ops.logprob.op import linear_logprob
from isobit.ops.portable.sums import sum_products, widen_rows
from isobit.order.plan import FeaturePlan

Logits = Callable[[Tensor, Tensor], Tensor]
SIZES = (1, 3, 8, 64, 65)  # rows of a step of decoding
TEMPERATURES = (1.0, 0.7, 2.0)


@dataclass(frozen=True)
class Head:
    """A head of a language model: fp32 logits for the rollout, log-probabilities for training."""

    logits: Logits
    score: Score

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the logits."""
        return self.logits(hidden, weight)

    def rollout(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Return the log-probability of each sampled token, from logits."""
        logits = self.logits(hidden, weight)
        if temperature != 1.0:
            logits = logits * (1.0 / torch.tensor(temperature))
        return log_softmax(logits).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def rollout_is_training(subject: Head, case: Case, tally: Tally) -> None:
    """A training batch has the bits of decoding steps of many sizes, at every temperature."""
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
    """Rollout and training agree for every shape, storage and number of threads."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 72).clamp(min=0)
    tally.count(case.rows)
    whole = subject.rollout(hidden, weight, targets)

    def compare(hidden: Tensor, weight: Tensor, where: str) -> None:
        tally.same(subject.score(hidden, weight, targets), whole, f"trained, {where}")
        tally.same(subject.rollout(hidden, weight, targets), whole, f"rolled out, {where}")

    for axis in (0, 1):
        found = subject.score(hidden.unsqueeze(axis), weight, targets.unsqueeze(axis))
        tally.same(found.squeeze(axis), whole, f"packed with an axis at {axis}")
    for name, store in LAYOUTS.items():
        compare(store(hidden), store(weight), f"stored {name}")
    for threads in THREADS:
        with thread_count(threads):
            compare(hidden, weight, f"{threads} threads")


def rounds_to_linear(subject: Head, case: Case, tally: Tally) -> None:
    """Logits are fp32; rounded to the dtype, they have the bits of isobit.linear."""
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
    segments = FeaturePlan(hidden.shape[1]).products
    known = sum_products(segments, widen_rows(hidden), widen_rows(weight))[0]
    tally.same(subject.logits(hidden, weight), known, "logits")


def refuses(subject: Head, case: Case, tally: Tally) -> None:
    """Each call raises an ArgumentError with a remedy."""
    refuses_each(subject.logits, refused_calls.lm_head(), tally)


# ---- planted --------------------------------------------------------------------------------------------


def _stock_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden, weight).float()


def _rounded_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Round through bf16, as inference engines store logits."""
    return linear_fp32(hidden, weight).bfloat16().float()


def _few_otherwise(hidden: Tensor, weight: Tensor) -> Tensor:
    """Use another kernel for few rows, as decoding does."""
    if hidden.shape[:-1].numel() >= 8:
        return linear_fp32(hidden, weight)
    return linear_fp32(hidden.flip(-1), weight.flip(-1))


def _widened_late(hidden: Tensor, weight: Tensor) -> Tensor:
    """Round to the dtype and widen again."""
    return linear(hidden, weight).float()


def _by_threads(hidden: Tensor, weight: Tensor) -> Tensor:
    """Sum in another order on more than one thread."""
    if torch.get_num_threads() == 1:
        return linear_fp32(hidden, weight)
    return linear_fp32(hidden.flip(-1), weight.flip(-1))


def _without_the_last_feature(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear_fp32(hidden[..., :-1], weight[:, :-1])


def _careless_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros(1)


ours = Head(linear_fp32, linear_logprob)
stock = Head(_stock_logits, stock_functions.linear_logprob)
bf16_logits = replace(ours, logits=_rounded_logits)
decoding_otherwise = replace(ours, logits=_few_otherwise)
widened_late, by_threads = replace(ours, logits=_widened_late), replace(ours, logits=_by_threads)
careless = replace(ours, logits=_careless_logits)
without_the_last_feature = replace(ours, logits=_without_the_last_feature)
temperature_after, neighbours_target, without_the_tail = (
    replace(ours, score=getattr(planted, name).score)
    for name in ("temperature_after", "neighbours_target", "without_the_tail")
)
