"""The portable executor of linear_logprob: the same sums in plain torch operations. Slow, and exact."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.ops.linear.portable import (
    merge_segments,
    one_nan,
    round_once,
    sum_products,
    sum_striped,
    widen,
)
from isobit.ops.log_softmax.portable import MaxSum, finite_or_zero
from isobit.ops.logarithm import log_positive
from isobit.ops.share import gradient_dtype
from isobit.ops.softmax.portable import exp_nonpositive
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan, Leaf, Segment
from isobit.order.samples import Samples


class Pair(MaxSum):
    """A pair (max, sum) whose merge keeps the left of two zeros, as the kernel does; torch.maximum's depends on where
    they stand."""

    def __add__(self, other: MaxSum) -> Pair:
        return Pair(
            torch.where(self.max < other.max, other.max, self.max), super().__add__(other).sum
        )


def logits_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[T, V], divided by the temperature."""
    segments = FeaturePlan(hidden.shape[1]).segments
    total = sum_products(segments, widen(hidden), widen(weight))[0]
    return total if temperature == 1.0 else total * inverse(temperature, total.dtype)


def inverse(temperature: float, dtype: torch.dtype) -> Tensor:
    """1 / temperature, in the dtype that sums have."""
    return 1.0 / torch.tensor(temperature, dtype=dtype)


def segments_of(cut: Cut) -> tuple[Segment, ...]:
    """Of a share of the vocabulary, counted from the share's start."""
    plan = FeaturePlan(cut.extent)
    return plan.segments[: plan.count // cut.parts]


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """[T] log-probabilities, 0 where there is no target; and [T, 2] of each row's maximum and logarithm of its sum."""
    return finish(
        *pairs_and_chosen(hidden, weight, targets, temperature, Cut(len(weight), 1, 0)), targets
    )


def pairs_and_chosen(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cut: Cut
) -> tuple[Tensor, Tensor]:
    """[T, 2] of the share's pairs (max, sum), and [T] of the targets' logits, +0 where the share has them not."""
    logits = logits_of(hidden, weight, temperature)

    def of_leaf(leaf: Leaf) -> Pair:
        part = logits[:, leaf.start : leaf.start + leaf.length]
        known = torch.where(part.isnan(), -torch.inf, part)  # a NaN is met by the sum
        most = known.amax(1, keepdim=True)
        terms = exp_nonpositive(part - finite_or_zero(most))
        return Pair(most, sum_striped(Leaf(0, leaf.length, False), terms.t()).unsqueeze(1))

    (total,) = merge_segments(segments_of(cut), of_leaf, 0)
    local = (targets - cut.start).unsqueeze(1)
    held = (local >= 0) & (local < cut.length)
    chosen = torch.where(held, logits.gather(1, local.clamp(0, cut.length - 1)), 0.0)
    return one_nan(torch.cat([total.max, total.sum], 1)), chosen.squeeze(1)


def finish(pairs: Tensor, chosen: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and [T, 2] of maxima and logarithms of sums, from the pairs of the whole vocabulary."""
    log_sum = log_positive(pairs[:, 1])
    found = torch.where(targets < 0, 0.0, (chosen - pairs[:, 0]) - log_sum)
    return one_nan(found), torch.stack([pairs[:, 0], log_sum], 1)


def linear_logprob_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    samples: Samples,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """dhidden over the vocabulary, dweight over the samples."""
    cut = Cut(len(weight), 1, 0)
    by_token, by_word = shard_backward(
        grad, hidden, weight, targets, stats, samples, temperature, cut
    )
    return round_once(by_token, hidden.dtype), by_word


def shard_backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    stats: Tensor,
    samples: Samples,
    temperature: float,
    cut: Cut,
) -> tuple[Tensor, Tensor]:
    """dhidden over the share's words, not rounded; dweight of its words, rounded unless the samples are a share."""
    logits = logits_of(hidden, weight, temperature)
    weights = exp_nonpositive((logits - stats[:, :1]) - stats[:, 1:])
    chosen = torch.arange(cut.start, cut.start + cut.length) == targets.unsqueeze(1)
    scaled = torch.where(targets < 0, 0.0, grad * inverse(temperature, grad.dtype)).unsqueeze(1)
    spread = torch.where(chosen, 1.0 - weights, -weights) * scaled
    by_token = sum_products(segments_of(cut), spread, widen(weight).t())[0]
    by_word = sum_products(samples.segments, spread.t(), widen(hidden).t())
    total = by_word[0] if len(by_word) else torch.zeros_like(weight, dtype=spread.dtype)
    return by_token, round_once(total, gradient_dtype(weight.dtype, len(samples.spans), samples.of))
