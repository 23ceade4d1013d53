"""Planted wrong log-probabilities: wrong in values or in gradients, and right in everything else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.library import stock as stock_functions
from isobit.library.claims import with_backward, with_value
from isobit.library.log_softmax import WRONG_SUMS, LogSumExp
from isobit.library.logprob.claims import Scored, gradients, in_shares
from isobit.ops.linear.op import linear_fp32
from isobit.ops.logprob.op import linear_logprob
from isobit.ops.portable.elementary import log_positive
from isobit.ops.portable.samples import whole_samples
from isobit.ops.portable.sums import MaxSum, sum_pairs
from isobit.order import tree
from isobit.order.samples import Samples

Values = Callable[[Tensor, Tensor, float], Tensor]  # (logits, targets, temperature) -> values


def with_values(values: Values) -> Scored:
    """Return log-probabilities by `values`, with the right gradients."""

    def score(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        right = linear_logprob(hidden, weight, targets, **options)
        if not hidden.numel():
            return right
        flat = targets.reshape(-1).long()
        logits = linear_fp32(hidden, weight).reshape(len(flat), -1)
        wrong = values(logits, flat, options.get("temperature", 1.0))
        return with_value(right, wrong.reshape(right.shape))

    return Scored(score)


def picked(logits: Tensor, total: MaxSum, targets: Tensor) -> Tensor:
    """Return the log-probabilities at the targets; 0 where a target is ignored."""
    chosen = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    found = ((chosen - total.max) - log_positive(total.sum)).squeeze(1)
    return torch.where(targets < 0, 0.0, found)


def scored(
    logits: Tensor, targets: Tensor, temperature: float, sum_of: LogSumExp = sum_pairs
) -> Tensor:
    """Return what linear_logprob computes of its logits, with another log-sum-exp if given."""
    warm = logits * (1 / torch.tensor(temperature))
    return picked(warm, sum_of(warm), targets)


def with_sum(sum_of: LogSumExp) -> Scored:
    """Return log-probabilities with another log-sum-exp."""
    return with_values(partial(scored, sum_of=sum_of))


def _neighbours_target(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    before = torch.where(targets < 0, targets, targets.roll(1).clamp(min=0))
    return scored(logits, before, temperature)


def _pairs_folded(logits: Tensor) -> MaxSum:
    """Fold four shares of the vocabulary from the left."""
    return reduce(operator.add, [sum_pairs(share) for share in logits.chunk(4, 1)])


over_the_batch, cut_by_threads, not_rescaled, without_the_tail = map(with_sum, WRONG_SUMS.values())
pairs_folded = with_sum(_pairs_folded)
temperature_after = with_values(lambda logits, targets, t: scored(logits, targets, 1.0) / t)
bf16_logits = with_values(lambda logits, *given: scored(logits.bfloat16().float(), *given))
ignored_counted = with_values(lambda logits, ids, t: scored(logits, ids.clamp(min=0), t))
neighbours_target = with_values(_neighbours_target)
a_hair_more = with_values(lambda *given: scored(*given) + 2.0**-20)


class Problem(NamedTuple):
    """What a backward pass has, as flat rows."""

    grad: Tensor
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: float
    samples: Samples

    def gradients(self, **changed: Any) -> tuple[Tensor, Tensor]:
        """Return the right dhidden and dweight, of a problem with some fields changed."""
        p = self._replace(**changed)
        options: dict[str, Any] = {"temperature": p.temperature, "samples": p.samples}
        return gradients(linear_logprob, p.hidden, p.weight, p.targets, p.grad, **options)


def with_grads(grads: Callable[[Problem], tuple[Tensor, Tensor]]) -> Scored:
    """Return the right log-probabilities with gradients by `grads`."""

    def score(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        samples: Samples | None = None,
    ) -> Tensor:
        described = samples or whole_samples(hidden, None)

        def backward(grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
            flat = hidden.reshape(-1, hidden.shape[-1])
            rows = grad.reshape(-1), flat, weight, targets.reshape(-1)
            by_row, by_word = grads(Problem(*rows, temperature, described))
            return by_row.reshape(hidden.shape), by_word, None

        function = partial(linear_logprob, temperature=temperature)
        return with_backward(function, backward, hidden, weight, targets)

    return Scored(score)


def _without_temperature(p: Problem) -> tuple[Tensor, Tensor]:
    by_row, by_word = p.gradients()
    return by_row * p.temperature, by_word * p.temperature


def _blunted(p: Problem) -> tuple[Tensor, Tensor]:
    """Take 2^-12 of the target's own word from dhidden, and 2^-12 of everything from dweight."""
    by_row, by_word = p.gradients()
    missing = 2.0**-12 * p.grad.unsqueeze(1) * p.weight[p.targets.clamp(min=0)]
    return by_row - missing, by_word * (1 - 2.0**-12)


def turned(targets: Tensor, vocabulary: int) -> Tensor:
    """Return the targets in a reversed vocabulary."""
    return torch.where(targets < 0, targets, vocabulary - 1 - targets)


def _by_rows(p: Problem) -> tuple[Tensor, Tensor]:
    """Sum dhidden of few rows with the vocabulary in another order."""
    if len(p.hidden) >= 8:
        return p.gradients()
    other = turned(p.targets, len(p.weight))
    return p.gradients(weight=p.weight.flip(0), targets=other)[0], p.gradients()[1]


def _tokens_backwards(p: Problem) -> tuple[Tensor, Tensor]:
    """Sum dweight with the tokens of a sample from the last to the first."""
    samples = p.samples
    spans = tuple((samples.rows - start - length, length) for start, length in samples.spans)
    flipped = {name: getattr(p, name).flip(0) for name in ("grad", "hidden", "targets")}
    described = Samples(spans, samples.rows, samples.first, samples.total)
    return p.gradients()[0], p.gradients(**flipped, samples=described)[1]


def _roots_rounded(p: Problem) -> tuple[Tensor, Tensor]:
    """Round dhidden of four shares of the vocabulary before they are merged."""
    _, roots, by_word = in_shares(p.hidden, p.weight, p.targets, p.grad, p.samples, 4)
    merged = tree.merge([root.bfloat16().float() for root in roots], torch.add)
    return merged.to(p.hidden.dtype), by_word


padding_counted = with_grads(lambda p: p.gradients(samples=Samples.packed([len(p.hidden)])))
ignored_pulled = with_grads(lambda p: p.gradients(targets=p.targets.clamp(min=0)))
without_temperature, dhidden_by_rows = with_grads(_without_temperature), with_grads(_by_rows)
tokens_backwards, blunted = with_grads(_tokens_backwards), with_grads(_blunted)
roots_rounded = with_grads(_roots_rounded)


def _reversed_score(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Sum few rows with the vocabulary in another order: right sums, other bits."""
    if targets.numel() >= 8:
        return linear_logprob(hidden, weight, targets, **options)
    return linear_logprob(hidden, weight.flip(0), turned(targets, len(weight)), **options)


def _wrapping_score(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
    return linear_logprob(hidden, weight, targets.long() % len(weight))


stock, vocabulary_reversed = Scored(stock_functions.linear_logprob), Scored(_reversed_score)
wrapping_targets = Scored(_wrapping_score)
