"""Planted wrong losses, of kinds found in training code: wrong in the value or in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library import stock as stock_functions
from isobit.library.cross_entropy.claims import Loss
from isobit.library.logprob import planted
from isobit.library.logprob.scored import Score
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, linear_logprob

Mean = Callable[[Tensor, Tensor, float], Tensor]  # log-probabilities, targets, count


def with_mean(mean: Mean, score: Score = linear_logprob) -> Loss:
    """Return a loss that takes another mean of the log-probabilities."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = IGNORED,
        num_items: float | None = None,
        **options: Any,
    ) -> Tensor:
        chosen = torch.where(targets == ignore_index, IGNORED, targets)
        active = float((chosen != IGNORED).sum()) if num_items is None else num_items
        return mean(score(hidden, weight, chosen, **options), chosen, active)

    return Loss(loss)


def _exact(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values) / -count


def _summed_plainly(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return values.sum() / -count


def _summed_in_order(values: Tensor, targets: Tensor, count: float) -> Tensor:
    total = values.new_zeros(())
    for value in values.reshape(-1):
        total = total + value
    return total / -count


def _padding_in_the_mean(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values) / -values.numel()


def _mean_of_means(values: Tensor, targets: Tensor, count: float) -> Tensor:
    halves, ids = values.reshape(-1).tensor_split(2), targets.reshape(-1).tensor_split(2)
    means = [
        exact_sum(v) / -max(float((t != IGNORED).sum()), 1.0)
        for v, t in zip(halves, ids, strict=True)
    ]
    return (means[0] + means[1]) / 2


def _ignored_at_one(values: Tensor, targets: Tensor, count: float) -> Tensor:
    """Count a loss of 1 for an ignored target."""
    return exact_sum(torch.where(targets == IGNORED, -1.0, values)) / -count


def _divided_first(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values / -count)


def _blunt(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values.bfloat16()) / -count


def _ignoring_one_id(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = 0, **named: Any
) -> Tensor:
    """Ignore −100 alone, whatever ignore_index is."""
    return linear_cross_entropy(hidden, weight, targets, **named)


def _careless(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, num_items: float | None = None, **_: Any
) -> Tensor:
    """Accept every count, and a batch without targets."""
    chosen = targets.long().clamp(0, len(weight) - 1)
    return F.cross_entropy(hidden @ weight.t(), chosen.expand(len(hidden)))


stock, careless, ignoring_one_id = (
    Loss(stock_functions.linear_cross_entropy),
    Loss(_careless),
    Loss(_ignoring_one_id),
)
summed_plainly, summed_in_order = with_mean(_summed_plainly), with_mean(_summed_in_order)
padding_in_the_mean, mean_of_means = with_mean(_padding_in_the_mean), with_mean(_mean_of_means)
ignored_at_one, blunt = with_mean(_ignored_at_one), with_mean(_blunt)
divided_first = with_mean(_divided_first)
bf16_logits = with_mean(_exact, planted.bf16_logits.score)
over_the_batch = with_mean(_exact, planted.over_the_batch.score)
neighbours_target = with_mean(_exact, planted.neighbours_target.score)
ignored_pulled = with_mean(_exact, planted.ignored_pulled.score)
tokens_backwards = with_mean(_exact, planted.tokens_backwards.score)
vocabulary_reversed = with_mean(_exact, planted.vocabulary_reversed.score)
