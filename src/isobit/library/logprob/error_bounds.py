"""Claims of logprob-kernel-v1 about errors: values and gradients against fp64, with limits from the orders."""

from __future__ import annotations

import torch
from torch import Tensor

from isobit.contracts.judge.recipes import Case
from isobit.contracts.judge.tally import Tally
from isobit.library.bounds import U, error_factor, sum_depth
from isobit.library.log_softmax.proofs import bound_of, reach_of
from isobit.library.logprob.scored import Scored, drawn_targets, gradients
from isobit.order.samples import Samples


def logits_error(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact logits, and how far those of the certified order are from them at most."""
    h, w = hidden.double(), weight.double()
    return h @ w.t(), error_factor(hidden.shape[1], hidden.dtype) * (h.abs() @ w.abs().t())


def error_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """|value − exact| is within the bound of the order plus twice the error of the logits.

    An error of the logits counts once at the target and once in the sum.
    """
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 82).clamp(min=0)
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    exact = logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    allowed = bound_of(len(weight), reach_of(logits) + 1) + 2 * off.amax(1)
    error = (subject.score(hidden, weight, targets).double() - exact).abs()
    tally.true(error <= allowed, "error over the bound of the order", error / allowed)


def gradient_bound(subject: Scored, case: Case, tally: Tally) -> None:
    """Errors of dhidden and dweight are within those of the probabilities, two roundings and the sum."""
    hidden, weight = case.arguments["hidden"], case.arguments["weight"]
    targets = drawn_targets(case, case.rows, 83).clamp(min=0)
    grad = case.draw((case.rows,), 85, "normal").float()
    tally.count(case.rows)
    logits, off = logits_error(hidden, weight)
    p = logits.softmax(1)
    chosen = torch.nn.functional.one_hot(targets, len(weight)).double()
    exact = (chosen - p) * grad.double().unsqueeze(1)
    # log p is off by the bound and the logits' errors, its exponential by 2 u more; 1 − p and the product round once.
    relative = bound_of(len(weight), reach_of(logits) + 1) + off + off.amax(1, keepdim=True) + 4 * U
    each = 1.01 * relative * p * grad.double().abs().unsqueeze(1) + 3 * U * exact.abs() + 2.0**-100
    described = Samples.packed([case.rows])
    found = gradients(subject.score, hidden, weight, targets, grad, samples=described)
    size, w, h = exact.abs() + each, weight.double(), hidden.double()
    over_words = (1 + U) ** sum_depth(len(weight), case.dtype) - 1
    # A leaf of 256 tokens, leaves folded.
    over_tokens = ((1 + U) ** (1 + 256 + case.rows // 256) - 1) * 1.001
    limits = (
        each @ w.abs() + (over_words + U) * (size @ w.abs()),
        each.t() @ h.abs() + (over_tokens + U) * (size.t() @ h.abs()),
    )
    names, true = ("dhidden", "dweight"), (exact @ w, exact.t() @ h)
    for what, mine, wanted, limit in zip(names, found, true, limits, strict=True):
        error = (mine.double() - wanted).abs()
        tally.true(error <= limit, f"{what} over its bound", error / limit)
