"""Wrong log-probabilities: as kernels get them wrong, in values or in gradients. Each is right in all else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library.log_softmax import proofs
from isobit.library.logprob.claims import Scored, gradients, in_shares
from isobit.ops.linear.op import linear_fp32
from isobit.ops.logprob.op import IGNORED, linear_logprob
from isobit.ops.portable.elementary import log_positive
from isobit.ops.portable.log_sum_exp import MaxSum, sum_pairs
from isobit.ops.portable.samples import whole_samples
from isobit.order import tree
from isobit.order.samples import Samples

Values = Callable[
    [Tensor, Tensor, float], Tensor
]  # logits before the temperature, targets, temperature
Grads = Callable[..., tuple[Tensor, Tensor]]


def with_values(values: Values) -> Scored:
    """Right in its gradients."""

    def score(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        samples: Samples | None = None,
    ) -> Tensor:
        right = linear_logprob(hidden, weight, targets, temperature=temperature, samples=samples)
        if not hidden.numel():
            return right
        flat = targets.reshape(-1).long()
        logits = linear_fp32(hidden, weight).reshape(len(flat), -1)
        wrong = values(logits, flat, temperature).reshape(right.shape)
        return Replaced.apply(right, wrong)  # type: ignore[no-any-return, no-untyped-call]

    return Scored(score)


class Replaced(torch.autograd.Function):
    """The second value, the first one's gradient."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, wrong: Tensor) -> Tensor:
        return wrong.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def picked(logits: Tensor, total: MaxSum, targets: Tensor) -> Tensor:
    """At the targets; 0 where there is none."""
    chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    return torch.where(
        targets < 0, 0.0, ((chosen - total.max) - log_positive(total.sum)).squeeze(1)
    )


def with_sum(sum_of: Callable[[Tensor], MaxSum]) -> Scored:
    """Another log-sum-exp."""

    def values(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        warm = logits * (1 / torch.tensor(temperature))
        return picked(warm, sum_of(warm), targets)

    return with_values(values)


def _temperature_after(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return picked(logits, sum_pairs(logits), targets) / temperature


def _bf16_logits(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    warm = logits.bfloat16().float() * (1 / torch.tensor(temperature))
    return picked(warm, sum_pairs(warm), targets)


def _ignored_counted(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    warm = logits * (1 / torch.tensor(temperature))
    return picked(warm, sum_pairs(warm), targets.clamp(min=0))


def _neighbours_target(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    warm = logits * (1 / torch.tensor(temperature))
    before = torch.where(targets < 0, targets, targets.roll(1).clamp(min=0))
    return picked(warm, sum_pairs(warm), before)


def _a_hair_more(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    warm = logits * (1 / torch.tensor(temperature))
    return picked(warm, sum_pairs(warm), targets) + 2.0**-20


def _pairs_folded(logits: Tensor) -> MaxSum:
    """Four shares of the vocabulary, each added to all before it."""
    return reduce(operator.add, [sum_pairs(share) for share in logits.chunk(4, 1)])


# ---- in the gradients -----------------------------------------------------------------------------------


class WithGrads(torch.autograd.Function):
    """Right values; gradients by `grads(grad, hidden, weight, targets, temperature, samples)` of flat rows."""

    @staticmethod
    def forward(
        ctx: Any, grads: Grads, temperature: float, samples: Samples, *given: Tensor
    ) -> Tensor:
        ctx.grads, ctx.temperature, ctx.samples = grads, temperature, samples
        ctx.save_for_backward(*given)
        return linear_logprob(*given, temperature=temperature)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[-1])
        by_row, by_word = ctx.grads(
            grad.reshape(-1), flat, weight, targets.reshape(-1), ctx.temperature, ctx.samples
        )
        return None, None, None, by_row.reshape(hidden.shape), by_word, None


def with_grads(grads: Grads) -> Scored:
    """Right in its values."""

    def score(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        samples: Samples | None = None,
    ) -> Tensor:
        described = samples or whole_samples(hidden, None)
        given = grads, temperature, described, hidden, weight, targets
        return WithGrads.apply(*given)  # type: ignore[no-any-return, no-untyped-call]

    return Scored(score)


def right_grads(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    """What the wrong ones begin with."""
    return gradients(
        linear_logprob, hidden, weight, targets, grad, temperature=temperature, samples=samples
    )


def _padding_counted(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    return right_grads(grad, hidden, weight, targets, temperature, Samples.packed([len(hidden)]))


def _without_temperature(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    by_row, by_word = right_grads(grad, hidden, weight, targets, temperature, samples)
    return by_row * temperature, by_word * temperature


def _ignored_pulled(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    return right_grads(grad, hidden, weight, targets.clamp(min=0), temperature, samples)


def _blunted(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    """dhidden misses 2^-12 of the target's own word, dweight 2^-12 of everything."""
    by_row, by_word = right_grads(grad, hidden, weight, targets, temperature, samples)
    return by_row - 2.0**-12 * grad.unsqueeze(1) * weight[targets.clamp(min=0)], by_word * (
        1 - 2.0**-12
    )


def _by_rows(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    """dhidden of few rows with the vocabulary in another order."""
    found = right_grads(grad, hidden, weight, targets, temperature, samples)
    if len(hidden) >= 8:
        return found
    other = torch.where(targets < 0, targets, len(weight) - 1 - targets)
    return right_grads(grad, hidden, weight.flip(0), other, temperature, samples)[0], found[1]


def _tokens_backwards(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    """dweight with the tokens of a sample from the last to the first."""
    spans = tuple((samples.rows - start - length, length) for start, length in samples.spans)
    turned = Samples(spans, samples.rows, samples.first, samples.of)
    flipped = right_grads(
        grad.flip(0), hidden.flip(0), weight, targets.flip(0), temperature, turned
    )
    return right_grads(grad, hidden, weight, targets, temperature, samples)[0], flipped[1]


def _roots_rounded(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    samples: Samples,
) -> tuple[Tensor, Tensor]:
    """dhidden of four shares of the vocabulary, rounded before they are merged."""
    _, roots, by_word = in_shares(hidden, weight, targets, grad, samples, 4)
    return tree.merge([root.bfloat16().float() for root in roots], torch.add).to(
        hidden.dtype
    ), by_word


def stock_score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    samples: Samples | None = None,
) -> Tensor:
    """torch's own, which holds the logits and knows no samples."""
    logits = (F.linear(hidden, weight) / temperature).reshape(-1, len(weight))
    found = -F.cross_entropy(
        logits, targets.reshape(-1).long(), ignore_index=IGNORED, reduction="none"
    )
    return found.reshape(targets.shape)


def _reversed_score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    samples: Samples | None = None,
) -> Tensor:
    """Few rows with the vocabulary in another order: right sums, other bits."""
    if targets.numel() >= 8:
        return linear_logprob(hidden, weight, targets, temperature=temperature, samples=samples)
    other = torch.where(targets < 0, targets, len(weight) - 1 - targets)
    return linear_logprob(hidden, weight.flip(0), other, temperature=temperature, samples=samples)


def _wrapping_score(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    return linear_logprob(hidden, weight, targets.long() % len(weight))


stock = Scored(stock_score)
vocabulary_reversed = Scored(_reversed_score)
wrapping_targets = Scored(_wrapping_score)
over_the_batch, cut_by_threads, not_rescaled, without_the_tail = (
    with_sum(proofs.PLANTED[name])
    for name in ("over_the_batch", "cut_by_threads", "not_rescaled", "without_the_tail")
)
temperature_after, bf16_logits = with_values(_temperature_after), with_values(_bf16_logits)
ignored_counted, neighbours_target = with_values(_ignored_counted), with_values(_neighbours_target)
a_hair_more, pairs_folded = with_values(_a_hair_more), with_sum(_pairs_folded)
padding_counted, without_temperature = (
    with_grads(_padding_counted),
    with_grads(_without_temperature),
)
ignored_pulled, dhidden_by_rows = with_grads(_ignored_pulled), with_grads(_by_rows)
tokens_backwards, blunted = with_grads(_tokens_backwards), with_grads(_blunted)
roots_rounded = with_grads(_roots_rounded)
