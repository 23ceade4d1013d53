"""Wrong embeddings, log-probabilities and losses."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.library.any_kernel.token_operators import CrossEntropy, Logprob
from isobit.library.gradients import with_backward, with_value
from isobit.library.stock import IGNORED


def off_by_one(ids: Tensor, weight: Tensor) -> Tensor:
    """Read the next row of the table."""
    return weight[(ids + 1) % len(weight)]


def last_row_for_all_above(ids: Tensor, weight: Tensor) -> Tensor:
    """Read a table that is short by one row."""
    return weight[ids.clamp(max=len(weight) - 2)]


def scaled_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Scale rows by the root of their length, as some models do."""
    return (weight[ids].float() * math.sqrt(weight.shape[-1])).to(weight.dtype)


def duplicates_dropped(ids: Tensor, weight: Tensor) -> Tensor:
    """Write gradients of repeated ids over each other instead of adding."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        found = torch.zeros_like(weight)
        found[ids] = grad
        return (found,)

    return with_backward(lambda weight: weight[ids], backward, weight)


def scaled_by_frequency(ids: Tensor, weight: Tensor) -> Tensor:
    """Divide gradients by how often an id occurs."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        found = torch.zeros(weight.shape).index_add(0, ids, grad.float())
        count = torch.bincount(ids, minlength=len(weight)).clamp(min=1).unsqueeze(-1)
        return ((found / count).to(weight.dtype),)

    return with_backward(lambda weight: weight[ids], backward, weight)


def sums_in_bf16(ids: Tensor, weight: Tensor) -> Tensor:
    """Add the table's gradient in bf16."""

    def backward(grad: Tensor, weight: Tensor) -> tuple[Tensor]:
        zeros = torch.zeros(weight.shape, dtype=torch.bfloat16)
        return (zeros.index_add(0, ids, grad.bfloat16()).to(weight.dtype),)

    return with_backward(lambda weight: weight[ids], backward, weight)


def first_row_is_padding(ids: Tensor, weight: Tensor) -> Tensor:
    """Give id 0 no gradient."""
    return F.embedding(ids, weight, padding_idx=0)


def ignored_at_zero(logits: Tensor, targets: Tensor) -> Tensor:
    """Take a row without a target for one of id 0."""
    return CrossEntropy.reference(logits.float(), targets.clamp(min=0)).to(logits.dtype)


def next_target(logits: Tensor, targets: Tensor) -> Tensor:
    """Score the next id."""
    other = torch.where(targets == IGNORED, targets, (targets + 1) % logits.shape[-1])
    return CrossEntropy.reference(logits.float(), other).to(logits.dtype)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """Smooth labels by a hundredth."""
    return F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.01
    ).to(logits.dtype)


def guarded_logarithm(logits: Tensor, targets: Tensor) -> Tensor:
    """Add 1e-4 inside the logarithm."""
    found = -torch.log(torch.softmax(logits.float(), -1) + 1e-4)
    chosen = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.masked_fill(targets == IGNORED, 0).to(logits.dtype)


def without_the_one(logits: Tensor, targets: Tensor) -> Tensor:
    """Return p instead of p − 1 as the gradient at the target."""
    right = CrossEntropy.reference(logits.float(), targets)
    log_sum = torch.logsumexp(logits.float(), -1).masked_fill(targets == IGNORED, 0)
    return with_value(log_sum, right).to(logits.dtype)


def ignored_have_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    """Give rows without a target the gradient of id 0."""
    wide = logits.float()
    return with_value(
        CrossEntropy.reference(wide, targets.clamp(min=0)), CrossEntropy.reference(wide, targets)
    ).to(logits.dtype)


def gradient_of_the_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Divide gradients by the number of rows, as of a mean."""
    right = CrossEntropy.reference(logits.float(), targets)
    return with_value(right / (len(logits) + 1), right).to(logits.dtype)


def logits_in_bf16(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute logits in bf16 for any dtype."""
    logits = (hidden.bfloat16() @ weight.bfloat16().mT).float()
    return -CrossEntropy.reference(logits, targets).to(hidden.dtype)


def last_word_forgotten(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Leave the last word out of the sum."""
    logits = hidden.float() @ weight.float().mT
    log_sum = torch.logsumexp(logits[..., :-1], -1)
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (chosen - log_sum).masked_fill(targets == IGNORED, 0).to(hidden.dtype)


def target_of_the_row_before(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Score the target of the row before: a shift that is applied twice."""
    return Logprob.reference(hidden.float(), weight.float(), targets.roll(1)).to(hidden.dtype)


def loss_instead(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, whose sign is the other."""
    return -Logprob.reference(hidden.float(), weight.float(), targets).to(hidden.dtype)


def head_has_no_gradient(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Take the weight for a constant."""
    nothing = weight.float().sum() * 0
    right = Logprob.reference(hidden.float(), weight.float().detach(), targets)
    return (right + nothing).to(hidden.dtype)


def probabilities_in_bf16(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Round dlogits to bf16 before the products of the gradients."""
    wide = hidden.float(), weight.float()

    def backward(grad: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        p = torch.softmax(hidden @ weight.mT, -1)
        one = F.one_hot(targets.clamp(min=0), len(weight))
        active = (targets != IGNORED).unsqueeze(-1)
        of_logits = ((one - p) * grad.unsqueeze(-1) * active).bfloat16().float()
        return of_logits @ weight, of_logits.mT @ hidden

    return with_backward(
        lambda hidden, weight: Logprob.reference(hidden, weight, targets), backward, *wide
    ).to(hidden.dtype)
