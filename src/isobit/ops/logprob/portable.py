"""The portable executor of linear_logprob: the same sums in plain torch operations. Slow, and exact."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import round_once, sum_products, widen
from isobit.ops.log_softmax.portable import sum_pairs
from isobit.ops.logarithm import log_positive
from isobit.ops.softmax.portable import exp_nonpositive
from isobit.order.plan import FeaturePlan
from isobit.order.samples import Samples


def logits_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[T, V], divided by the temperature."""
    segments = FeaturePlan(hidden.shape[1]).segments
    total = sum_products(segments, widen(hidden), widen(weight))[0]
    return total if temperature == 1.0 else total * inverse(temperature, total.dtype)


def inverse(temperature: float, dtype: torch.dtype) -> Tensor:
    """1 / temperature, in the dtype that sums have."""
    return 1.0 / torch.tensor(temperature, dtype=dtype)


def linear_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[T] log-probabilities, 0 where there is no target; and [T, 2] of each row's maximum and logarithm of its sum."""
    logits = logits_of(hidden, weight, temperature)
    total = sum_pairs(logits)
    chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    log_sum = log_positive(total.sum)
    found = torch.where(targets < 0, 0.0, ((chosen - total.max) - log_sum).squeeze(1))
    return round_once(found, found.dtype), torch.cat([total.max, log_sum], 1)


def linear_logprob_backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, stats: Tensor, samples: Samples, temperature: float
) -> tuple[Tensor, Tensor]:
    """dhidden over the vocabulary, dweight over the samples."""
    logits = logits_of(hidden, weight, temperature)
    weights = exp_nonpositive((logits - stats[:, :1]) - stats[:, 1:])
    chosen = torch.arange(logits.shape[1]) == targets.unsqueeze(1)
    scaled = torch.where(targets < 0, 0.0, grad * inverse(temperature, grad.dtype)).unsqueeze(1)
    spread = torch.where(chosen, 1.0 - weights, -weights) * scaled
    segments = FeaturePlan(logits.shape[1]).segments
    by_token = sum_products(segments, spread, widen(weight).t())[0]
    by_word = sum_products(samples.segments, spread.t(), widen(hidden).t())
    total = by_word[0] if len(by_word) else torch.zeros_like(weight, dtype=spread.dtype)
    return round_once(by_token, hidden.dtype), round_once(total, weight.dtype)
