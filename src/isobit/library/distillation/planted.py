"""Planted wrong losses of distillation, of kinds found in training code, and the definition in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.distillation.loss import distillation_loss
from isobit.ops.exact_sum.op import exact_sum
from isobit.ops.logprob.op import IGNORED

Loss = Callable[..., Tensor]  # (hidden, weight, teacher, targets, **options) -> Tensor


@dataclass(frozen=True)
class Distilled:
    """A loss of distillation."""

    loss: Loss

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the divergence of each token from a teacher of half the logits."""
        return self.divergence(hidden, weight, (hidden / 2, weight))

    def divergence(self, hidden: Tensor, weight: Tensor, teacher: Any, **options: Any) -> Tensor:
        """Return the divergence of each token, over temperature squared."""
        named = {"alpha": 1.0, "reduction": "none", **options}
        return self.loss(hidden, weight, teacher, None, **named)


def stable_divergence(p: Tensor, q: Tensor, direction: str, beta: float) -> Tensor:
    """Return the divergence of fp64 log-probabilities p of the teacher and q of the student, by expm1 and log1p."""
    if direction == "forward":
        ratio = p - q
        return (q.exp() * (ratio.exp() * ratio - torch.expm1(ratio))).sum(-1)
    if direction == "reverse":
        return stable_divergence(q, p, "forward", beta)
    # log(m / p) and log(m / q), each by the difference of the other one
    of_p = torch.log1p((1 - beta) * torch.expm1((q - p).clamp(max=600)))
    of_q = torch.log1p(beta * torch.expm1((p - q).clamp(max=600)))
    of_p = torch.where(q > p, (q - p) + torch.log1p(beta * torch.expm1(p - q)), of_p)
    of_q = torch.where(p > q, (p - q) + torch.log1p((1 - beta) * torch.expm1(q - p)), of_q)
    m = p + of_p
    parts = (
        weight * stable_divergence(one, m, "forward", beta)
        for weight, one in ((beta, p), (1 - beta, q))
    )
    return sum(parts, torch.zeros(p.shape[:-1], dtype=p.dtype))


def logits_of(hidden: Tensor, weight: Tensor, teacher: Any) -> tuple[Tensor, Tensor]:
    """Return the student's and the teacher's logits by torch."""
    logits = F.linear(hidden, weight)
    if isinstance(teacher, Tensor):
        return logits, teacher
    first, second = teacher
    if first.is_floating_point():
        return logits, F.linear(first, second)
    room = torch.full_like(logits, -1e4)
    return logits, room.scatter(-1, first.long(), second.to(room.dtype))


def torch_divergence(p: Tensor, q: Tensor, direction: str, beta: float) -> Tensor:
    """Return the divergence as TRL's generalized_jsd_loss computes it, from log-probabilities."""
    if direction == "forward":
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    if direction == "reverse":
        return F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    logs = torch.log(torch.tensor([1 - beta, beta], dtype=p.dtype))
    m = torch.logsumexp(torch.stack([q + logs[0], p + logs[1]]), dim=0)
    to_teacher = F.kl_div(m, p, reduction="none", log_target=True)
    to_student = F.kl_div(m, q, reduction="none", log_target=True)
    return (beta * to_teacher + (1 - beta) * to_student).sum(-1)


Normalise = Callable[[Tensor], Tensor]


def by_torch(
    normalise: Normalise = lambda logits: logits.log_softmax(-1), squared: bool = True
) -> Loss:
    """Return a loss in torch's operations."""

    def loss(
        hidden: Tensor,
        weight: Tensor,
        teacher: Any,
        targets: Tensor | None,
        *,
        temperature: float = 1.0,
        alpha: float = 0.5,
        direction: str = "forward",
        beta: float = 0.5,
        reduction: str = "mean",
        num_items: float | None = None,
        **_: Any,
    ) -> Tensor:
        logits, others = logits_of(hidden, weight, teacher)
        p, q = (normalise(x / temperature) for x in (others.to(logits.dtype), logits))
        found = alpha * torch_divergence(p, q, direction, beta)
        found = found * temperature**2 if squared else found
        chosen = torch.zeros(found.shape, dtype=torch.int64) if targets is None else targets.long()
        flat = chosen.reshape(-1)
        if alpha < 1:
            ce = F.cross_entropy(logits.reshape(len(flat), -1), flat, reduction="none")
            found = found + (1 - alpha) * ce.reshape(found.shape)
        found = torch.where(chosen == IGNORED, 0.0, found).to(
            torch.float64 if logits.dtype == torch.float64 else torch.float32
        )
        if reduction == "none":
            return found
        return found.sum() / (num_items or max(int((chosen != IGNORED).sum()), 1))

    return loss


definition = by_torch()  # in fp64


def with_options(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Distilled:
    """Return the loss with other options than those it was given."""

    def loss(hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any) -> Tensor:
        return distillation_loss(hidden, weight, teacher, targets, **change(dict(options)))

    return Distilled(loss)


def with_result(change: Callable[[Tensor, dict[str, Any]], Tensor]) -> Distilled:
    """Return the loss with another result."""

    def loss(hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any) -> Tensor:
        return change(distillation_loss(hidden, weight, teacher, targets, **options), options)

    return Distilled(loss)


def with_teacher(change: Callable[[Any], Any]) -> Distilled:
    """Return the loss with another teacher than the one it was given."""

    def loss(hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any) -> Tensor:
        return distillation_loss(hidden, weight, change(teacher), targets, **options)

    return Distilled(loss)


def with_mean(mean: Callable[[Tensor, Tensor], Tensor]) -> Distilled:
    """Return a loss that takes another mean of the tokens' losses."""

    def loss(hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any) -> Tensor:
        if options.get("reduction") == "none" or targets is None:
            return distillation_loss(hidden, weight, teacher, targets, **options)
        named = {key: value for key, value in options.items() if key != "reduction"}
        each = distillation_loss(hidden, weight, teacher, targets, reduction="none", **named)
        return mean(each, targets)

    return Distilled(loss)


def with_gradient(other: Loss) -> Distilled:
    """Return a loss with the right value and another loss's gradient."""

    def loss(*given: Any, **options: Any) -> Tensor:
        wrong = other(*given, **options)
        return distillation_loss(*given, **options).detach() + (wrong - wrong.detach())

    return Distilled(loss)


def _count(targets: Tensor) -> int:
    return max(int((targets != IGNORED).sum()), 1)


def _in_order(each: Tensor, targets: Tensor) -> Tensor:
    total = each.new_zeros(())
    for value in each.reshape(-1):
        total = total + value
    return total / _count(targets)


def _mean_of_means(each: Tensor, targets: Tensor) -> Tensor:
    halves = zip(each.tensor_split(2), targets.tensor_split(2), strict=True)
    return torch.stack([exact_sum(v) / _count(t) for v, t in halves]).mean()


def _exchanged(options: dict[str, Any]) -> dict[str, Any]:
    turned = {"forward": "reverse", "reverse": "forward", "jsd": "jsd"}
    return options | {"direction": turned[options.get("direction", "forward")], "beta": 0.6}


def _by_count(*given: Any, **options: Any) -> Tensor:
    """Use torch's form for more than 16 rows."""
    return (trl.loss if len(given[0]) > 16 else distillation_loss)(*given, **options)


def _apart(teacher: Any) -> Any:
    """Normalise the teacher before the loss does, in torch."""
    if isinstance(teacher, Tensor):
        return teacher.float().log_softmax(-1)
    first, second = teacher
    return F.linear(first, second).float().log_softmax(-1) if first.is_floating_point() else teacher


def _renormalised(teacher: Any) -> Any:
    if isinstance(teacher, Tensor) or teacher[0].is_floating_point():
        return teacher
    return teacher[0], teacher[1].log_softmax(-1)


def _in_bf16(hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any) -> Tensor:
    """Round the student to bf16."""
    hidden, weight = (t.bfloat16().to(t.dtype) for t in (hidden, weight))
    return distillation_loss(hidden, weight, teacher, targets, **options)


def _forward_only(*given: Any, **options: Any) -> Tensor:
    return distillation_loss(*given, **(options | {"direction": "forward"}))


def _over_temperature(*given: Any, **options: Any) -> Tensor:
    found: Tensor = distillation_loss(*given, **options)
    return found / float(options.get("temperature", 1.0))


def _ignored_pulled(
    hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any
) -> Tensor:
    chosen = None if targets is None else targets.clamp(min=0)
    return distillation_loss(hidden, weight, teacher, chosen, **options)


def _reversed_tokens(
    hidden: Tensor, weight: Tensor, teacher: Any, targets: Any, **options: Any
) -> Tensor:
    """Take the tokens of a call as one sample each: dweight has another order."""
    named = {key: value for key, value in options.items() if key != "samples"}
    return distillation_loss(hidden, weight, teacher, targets, **named)


trl = Distilled(by_torch(squared=False))  # what TRL 1.16 computes
torch_form = Distilled(by_torch())
bf16_log_softmax = Distilled(
    by_torch(lambda logits: logits.log_softmax(-1).bfloat16().to(logits.dtype))
)
careless = Distilled(by_torch())
summed_plainly = with_mean(lambda each, targets: each.sum() / _count(targets))
summed_in_order = with_mean(_in_order)
mean_of_means = with_mean(_mean_of_means)
padding_in_the_mean = with_mean(lambda each, targets: exact_sum(each) / each.numel())
by_count = Distilled(_by_count)
without_t_squared = with_result(lambda found, options: found / options.get("temperature", 1.0) ** 2)
blunt = with_result(lambda found, _: found.bfloat16().float())
a_hair_less = with_result(lambda found, _: found - 2.0**-40)
alpha_exchanged = with_options(
    lambda given: given | {"alpha": 1 - given["alpha"] if 0 < given.get("alpha", 1) < 1 else 1.0}
)
directions_exchanged = with_options(_exchanged)
normalised_apart = with_teacher(_apart)
renormalised_words = with_teacher(_renormalised)
in_bf16 = Distilled(_in_bf16)
gradient_of_forward = with_gradient(_forward_only)
gradient_over_temperature = with_gradient(_over_temperature)
gradient_in_bf16 = with_gradient(_in_bf16)
ignored_pulled = with_gradient(_ignored_pulled)
without_samples = with_gradient(_reversed_tokens)
