"""Wrong losses: as training code gets them wrong, in the value or in the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library.cross_entropy.claims import Loss
from isobit.library.logprob import planted
from isobit.library.logprob.claims import Score
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.loss import linear_cross_entropy
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.order.samples import Samples

Mean = Callable[[Tensor, Tensor, float], Tensor]  # log-probabilities, targets, count


def with_mean(mean: Mean, score: Score = linear_logprob) -> Loss:
    """Log-probabilities made into a loss in another way."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int = IGNORED,
        num_items: float | None = None,
        samples: Samples | None = None,
    ) -> Tensor:
        chosen = torch.where(targets == ignore_index, IGNORED, targets)
        active = float((chosen != IGNORED).sum()) if num_items is None else num_items
        return mean(
            score(hidden, weight, chosen, temperature=temperature, samples=samples), chosen, active
        )

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
    """An ignored target has a loss of its own."""
    return exact_sum(torch.where(targets == IGNORED, -1.0, values)) / -count


def _divided_first(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values / -count)


def _blunt(values: Tensor, targets: Tensor, count: float) -> Tensor:
    return exact_sum(values.bfloat16()) / -count


def _ignoring_one_id(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = 0, **named: Any
) -> Tensor:
    """Knows −100 alone."""
    return linear_cross_entropy(hidden, weight, targets, **named)


def _careless(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, num_items: float | None = None, **_: Any
) -> Tensor:
    """Takes every count, and a batch without targets."""
    chosen = targets.long().clamp(0, len(weight) - 1)
    return F.cross_entropy(hidden @ weight.t(), chosen.expand(len(hidden)))


def _stock(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORED,
    num_items: float | None = None,
    samples: Samples | None = None,
) -> Tensor:
    """torch's own."""
    logits = (F.linear(hidden, weight).float() / temperature).reshape(-1, len(weight))
    total = F.cross_entropy(
        logits, targets.reshape(-1).long(), ignore_index=ignore_index, reduction="sum"
    )
    active = int((targets != ignore_index).sum()) if num_items is None else num_items
    return total / active


stock, careless, ignoring_one_id = Loss(_stock), Loss(_careless), Loss(_ignoring_one_id)
summed_plainly, summed_in_order = with_mean(_summed_plainly), with_mean(_summed_in_order)
padding_in_the_mean, mean_of_means = with_mean(_padding_in_the_mean), with_mean(_mean_of_means)
ignored_at_one, divided_first, blunt = (
    with_mean(_ignored_at_one),
    with_mean(_divided_first),
    with_mean(_blunt),
)
(
    bf16_logits,
    over_the_batch,
    neighbours_target,
    ignored_pulled,
    tokens_backwards,
    vocabulary_reversed,
) = (
    with_mean(_exact, getattr(planted, name).score)
    for name in (
        "bf16_logits",
        "over_the_batch",
        "neighbours_target",
        "ignored_pulled",
        "tokens_backwards",
        "vocabulary_reversed",
    )
)
