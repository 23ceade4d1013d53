"""The portable executor of linear_logprob: the same sums in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit import bits
from isobit.ops.attesting import Call, call_native, wide_values
from isobit.ops.portable.elementary import exp_nonpositive, log_positive, soft_cap
from isobit.ops.portable.sums import (
    Pair,
    merge_pairs,
    one_nan,
    round_once,
    sum_products,
    widen_rows,
)
from isobit.ops.share import gradient_dtype
from isobit.order.cut import Cut
from isobit.order.plan import FeaturePlan, Segment
from isobit.order.samples import Samples


def logits_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return logits [T, V] divided by the temperature."""
    segments = FeaturePlan(hidden.shape[1]).products
    total = sum_products(segments, widen_rows(hidden), widen_rows(weight))[0]
    return total if temperature == 1.0 else total * inverse(temperature, total.dtype)


def capped_logits(
    hidden: Tensor, weight: Tensor, temperature: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Return logits [T, V] with a soft cap, divided by the temperature, and the cap's derivative; None without one."""
    if not softcap:
        return logits_of(hidden, weight, temperature), None
    logits, slope = soft_cap(logits_of(hidden, weight, 1.0), softcap)
    return logits * inverse(temperature, logits.dtype), slope


def inverse(temperature: float, dtype: torch.dtype) -> Tensor:
    """Return 1 / temperature in the accumulation dtype."""
    return 1.0 / torch.tensor(temperature, dtype=dtype)


def segments_of(cut: Cut) -> tuple[Segment, ...]:
    """Return the segments of a share of the vocabulary, with positions counted from the start of the share."""
    plan = FeaturePlan(cut.extent)
    return plan.segments[: plan.count // cut.parts]


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T], 0 where there is no target, and each row's maximum and log of its sum [T, 2]."""
    whole = Cut(len(weight), 1, 0)
    found = pairs_and_chosen(hidden, weight, targets, temperature, whole, softcap)
    return finish(*found, targets)


def pairs_and_chosen(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    cut: Cut,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the share's pairs (max, sum) [T, 2] and the targets' logits [T], +0 where another share has the target."""
    logits, _ = capped_logits(hidden, weight, temperature, softcap)
    total = merge_pairs(logits, segments_of(cut), Pair)
    local = (targets - cut.start).unsqueeze(1)
    held = (local >= 0) & (local < cut.length)
    chosen = torch.where(held, logits.gather(1, local.clamp(0, cut.length - 1)), 0.0)
    return one_nan(torch.cat([total.max, total.sum], 1)), chosen.squeeze(1)


def finish(pairs: Tensor, chosen: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T], and maxima and logs of sums [T, 2], from the pairs of the whole vocabulary."""
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
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return dhidden, summed over the vocabulary, and dweight, summed over the samples."""
    cut = Cut(len(weight), 1, 0)
    by_token, by_word = shard_backward(
        grad, hidden, weight, targets, stats, samples, temperature, cut, softcap
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
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return (dhidden summed over the share's words, not rounded; dweight of its words).

    dweight is rounded unless the samples are a share.
    """
    logits, slope = capped_logits(hidden, weight, temperature, softcap)
    weights = exp_nonpositive((logits - stats[:, :1]) - stats[:, 1:])
    chosen = torch.arange(cut.start, cut.start + cut.length) == targets.unsqueeze(1)
    scaled = torch.where(targets < 0, 0.0, grad * inverse(temperature, grad.dtype)).unsqueeze(1)
    spread = torch.where(chosen, 1.0 - weights, -weights) * scaled
    if slope is not None:
        spread = spread * slope
    plan = FeaturePlan(cut.extent)
    words = plan.products[: plan.count // cut.parts]
    by_token = sum_products(words, spread, widen_rows(weight).t())[0]
    by_word = sum_products(samples.segments, spread.t(), widen_rows(hidden).t())
    total = by_word[0] if len(by_word) else torch.zeros_like(weight, dtype=spread.dtype)
    return by_token, round_once(
        total, gradient_dtype(weight.dtype, len(samples.spans), samples.total)
    )


# Compare an executor's linear_logprob with the portable one, bit for bit.

VOCABULARY, WIDTH, ROWS = 1026, 16, 3  # two segments, each with a tail


def difference_on_gpu(dtype: torch.dtype, call: Call) -> str | None:
    """Return what differs first, also of logits with a soft cap, which the native operator does not take."""
    return difference(dtype, call) or difference(dtype, call, 1.7)


def difference(dtype: torch.dtype, call: Call = call_native, softcap: float = 0.0) -> str | None:
    """Return what differs first, or None; other dtypes than fp32 share the code."""
    capped = (0, softcap) if softcap else ()
    if dtype != torch.float32:
        return None
    generator = torch.Generator().manual_seed(WIDTH)
    hidden, weight = (wide_values((n, WIDTH), dtype, generator) for n in (ROWS, VOCABULARY))
    targets, grad = (
        torch.tensor([0, VOCABULARY - 1, -100]),
        torch.tensor([1.0, -0.3, 2.0], dtype=torch.float32),
    )
    samples = Samples.packed([ROWS])
    spans = torch.tensor(samples.spans)
    problem = hidden, weight, targets
    found, stats = call("linear_logprob", *problem, 0.7, spans, *capped)
    given = call("linear_logprob_backward", grad, *problem, stats, spans, 0.7, True, True, *capped)
    known = linear_logprob(*problem, 0.7, softcap)
    grads = linear_logprob_backward(grad, *problem, stats, samples, 0.7, softcap)
    pairs = [(found, known[0]), (stats, known[1]), *zip(given, grads, strict=True)]
    for name, (left, right) in zip(("values", "sums", "dhidden", "dweight"), pairs, strict=True):
        if not bits.equal(left, right):
            return f"linear_logprob's {name}"
    return None
